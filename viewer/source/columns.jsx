// The responses of a group side by side, each once for every lane: one series, the other, the
// difference. Only the columns on the screen are drawn.
import { flushSync, memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useVirtualizer } from "@tanstack/react-virtual";
import { at, divergence } from "./data.js";
import { shadeClass, shown } from "./colour.js";

export const WIDTHS = { narrow: 300, medium: 440, wide: 760 };
const FIRST = 4000;

/** The value of a lane at each token: of a series, or the difference of two. */
export function laneValues(lane, response) {
  const first = response.values.get(lane.key);
  if (lane.minus === undefined) return first;
  const second = response.values.get(lane.minus);
  if (!first || !second) return undefined;
  return first.map((value, i) => value - second[i]);
}

export function Columns(props) {
  const { page, items, printing, focusRef } = props;
  const scroller = useRef(null);
  const [room, setRoom] = useState(Infinity);
  const width = Math.min(props.width, room);
  const virtual = useVirtualizer({
    count: items.length,
    horizontal: true,
    getScrollElement: () => scroller.current,
    estimateSize: () => width,
    overscan: 1,
  });
  useLayoutEffect(() => virtual.measure(), [width]);
  useLayoutEffect(() => {
    // A column is never wider than what can be seen at once.
    const observer = new ResizeObserver(([entry]) => setRoom(entry.contentRect.width || Infinity));
    observer.observe(scroller.current);
    return () => observer.disconnect();
  }, []);
  const first = items.findIndex((item) => item.reference);
  const reference = items[first]?.row;
  const show = () => first >= 0 && virtual.scrollToIndex(first, { align: "auto" });
  useEffect(() => {
    show();
    if (scroller.current) scroller.current.scrollTop = 0;
  }, [reference, width, items.length]);
  // Asked for by a key, maybe before the group is there or while its column is out of sight.
  useEffect(() => {
    if (!focusRef.current || !items.length) return;
    const tokens = scroller.current.querySelector(".reference .tokens");
    if (tokens) {
      focusRef.current = false;
      tokens.focus();
    } else show();
  });

  const all = printing || items.length <= 3;
  const drawn = all
    ? items.map((item, index) => ({ index, start: index * width }))
    : virtual.getVirtualItems();
  return (
    <div class={`columns ${printing ? "printing" : ""}`} ref={scroller}>
      <div class="strip" style={{ width: `${items.length * width}px` }}>
        {drawn.map(({ index, start }) => {
          const item = items[index];
          return (
            <Column
              key={`${item.row}-${item.lane.id}`}
              {...item}
              left={start}
              width={width}
              page={page}
              shared={props.shared}
              printing={printing}
              onToken={props.onToken}
              onSelect={props.onSelect}
            />
          );
        })}
      </div>
    </div>
  );
}

const Column = memo(function Column(props) {
  const { page, row, response, lane, left, width, reference, parting, shared, printing } = props;
  const { rows } = page;
  const [most, setMost] = useState(FIRST);
  const count = printing ? Infinity : most;
  const values = laneValues(lane, response);
  const success = rows.success[row];
  const rule = lane.minus === undefined ? page.rules[lane.rule] : undefined;
  const facts = [
    ["reward", rows.reward[row]],
    ...(rule
      ? [
          [lane.credit ? "base" : `base (${page.titles[lane.rule]})`, at(rule.base, row)],
          ...(rule.reward.some((value) => value !== null) ? [["shaped", at(rule.reward, row)]] : []),
          ["effective", at(rule.effective, row)],
          ["flips", at(rule.flips, row)],
        ]
      : []),
    ["tokens", rows.length[row]],
    ...(page.rewards.length > 1 ? page.rewards.map(([name, column]) => [name, at(column, row)]) : []),
  ];
  const marks = [
    rows.truncated[row] && "truncated",
    rows.keep[row] === false && "kept out of the loss",
    rows.reward[row] === null && "not scored",
    lane.key && !values && `no ${lane.title} recorded`,
  ].filter(Boolean);
  return (
    <article
      class={`column ${reference ? "reference" : ""}`}
      style={{ left: `${left}px`, width: `${width}px` }}
      aria-label={`response ${row + 1}, ${lane.title}`}
    >
      <header>
        <div class="heading">
          <button type="button" class="name" tabIndex={-1} onClick={() => props.onSelect(row)}>
            #{row + 1} {success === null ? "" : success ? "\u2713 right" : "\u2717 wrong"}
          </button>
          <span class="lane">{lane.title}</span>
        </div>
        <dl>
          {facts.map(([name, value]) => (
            <div class="pair">
              <dt>{name}</dt>
              <dd>{shown(value, 4)}</dd>
            </div>
          ))}
          {lane.minus !== undefined && <Room lines={page.factLines(lane) - facts.length} />}
        </dl>
        <p class="marks">{marks.join(", ") || "\u00a0"}</p>
      </header>
      <Tokens
        {...{ page, row, response, lane, values, parting, shared, count }}
        onToken={props.onToken}
        onMore={() => setMost(Infinity)}
      />
      {response.codes.length > count && (
        <button type="button" class="more" onClick={() => setMost(most + FIRST)}>
          {response.codes.length - count} more tokens
        </button>
      )}
    </article>
  );
});

/** Empty facts, so that the tokens of a column without statistics stand as high as the others. */
const Room = ({ lines }) =>
  Array.from({ length: Math.max(lines, 0) }, () => <div class="pair">{"\u00a0"}</div>);

/** The element of a token. */
export const tokenId = (row, lane, i) => `t-${row}-${lane}-${i}`;

function Tokens({ page, row, response, lane, values, parting, shared, count, onToken, onMore }) {
  const box = useRef(null);
  const active = useRef(0);
  const pointer = useRef("");
  const { codes, mask } = response;
  const end = Math.min(codes.length, count);
  const pick = (i) => onToken({ row, lane: lane.id, i });

  const go = (i, scroll = true) => {
    const to = Math.min(Math.max(i, 0), codes.length - 1);
    if (to >= end) flushSync(onMore);
    active.current = to;
    const element = document.getElementById(tokenId(row, lane.id, to));
    box.current.setAttribute("aria-activedescendant", tokenId(row, lane.id, to));
    if (scroll) element?.scrollIntoView({ block: "nearest", inline: "nearest" });
    pick(to);
  };
  const placeOf = (target) => {
    const found = target.closest?.(".t");
    return found && box.current.contains(found) ? Number(found.id.split("-").at(-1)) : null;
  };
  /** The token one line further up or down, nearest to this one. */
  const line = (direction) => {
    const here = document.getElementById(tokenId(row, lane.id, active.current));
    if (!here) return active.current;
    const from = here.getBoundingClientRect();
    let best = active.current;
    let top = null;
    let distance = Infinity;
    for (let i = active.current + direction; i >= 0 && i < end; i += direction) {
      const element = document.getElementById(tokenId(row, lane.id, i));
      const [rect] = element.getClientRects();
      if (!rect || Math.abs(rect.top - from.top) < 4) continue;
      if (top !== null && Math.abs(rect.top - top) > 4) break;
      top = rect.top;
      const away = Math.abs(rect.left - from.left);
      if (away < distance) [distance, best] = [away, i];
    }
    return best;
  };
  const onKeyDown = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const moves = {
      ArrowRight: () => active.current + 1,
      ArrowLeft: () => active.current - 1,
      ArrowDown: () => line(1),
      ArrowUp: () => line(-1),
      Home: () => 0,
      End: () => codes.length - 1,
    };
    if (!moves[event.key] || !end) return;
    event.preventDefault();
    go(moves[event.key]());
  };

  const draw = (from, to) => {
    const spans = [];
    for (let i = from; i < to; i += 1) {
      const [text, kind] = page.vocabulary[codes[i]];
      const shade = shadeClass(values?.[i], mask[i] === 1, lane.scale, page.levels);
      const extra = (kind ? ` k${kind}` : "") + (i === parting ? " parting" : "");
      spans.push(
        <span class={`t ${shade}${extra}`} id={tokenId(row, lane.id, i)}>
          {text}
        </span>,
      );
    }
    return spans;
  };
  const prefix = Math.min(shared, end);
  const whole = shared > 0 && shared <= end;
  return (
    <div
      class="tokens"
      ref={box}
      tabIndex={0}
      role="group"
      aria-label={`tokens of response ${row + 1} by ${lane.title}; arrow keys read the numbers`}
      onKeyDown={onKeyDown}
      // A click picks its own token; only the keyboard goes to the one that was left.
      onFocus={() => end && box.current.matches(":focus-visible") && go(active.current)}
      onMouseMove={(event) => {
        // Scrolling moves the page under a pointer that rests: that picks nothing.
        const now = `${event.screenX} ${event.screenY}`;
        if (pointer.current === now) return;
        pointer.current = now;
        const i = placeOf(event.target);
        if (i !== null) pick(i);
      }}
      onClick={(event) => {
        const i = placeOf(event.target);
        if (i !== null) go(i, false);
      }}
    >
      {whole && <div class="shared">{draw(0, prefix)}</div>}
      {whole && (
        <div class="divide">
          {shared} {shared === 1 ? "token" : "tokens"} shared by all
        </div>
      )}
      {draw(whole ? prefix : 0, end)}
    </div>
  );
}

/** The columns of a group: its rows, each in every lane. */
export function columnItems(page, group, number, reference, lanes, only) {
  const { first, count } = page.groups[number];
  const wanted = reference - first;
  const chosen = group.responses[wanted];
  const items = [];
  let earliest = Infinity;
  for (let k = 0; k < count; k += 1) {
    if (only && k !== wanted) continue;
    // Where a response leaves the chosen one.
    const { place } = divergence(page.vocabulary, chosen, group.responses[k]);
    if (place >= 0 && k !== wanted) earliest = Math.min(earliest, place);
    for (const lane of lanes) {
      items.push({
        row: first + k,
        response: group.responses[k],
        lane,
        reference: k === wanted,
        parting: place,
      });
    }
  }
  // In the chosen one: where the first of the others leaves it.
  for (const item of items) if (item.reference) item.parting = earliest;
  return items;
}
