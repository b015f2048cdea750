// All responses: sorted, filtered, and only those on the screen drawn.
import { useEffect, useMemo, useRef } from "preact/hooks";
import { useVirtualizer } from "@tanstack/react-virtual";
import { at } from "./data.js";
import { shown } from "./colour.js";

export const COLUMNS = [
  { key: "order", title: "#", hint: "order in the file" },
  { key: "reward", title: "reward", hint: "the response's reward" },
  { key: "length", title: "tokens", hint: "tokens inside the mask" },
  { key: "effective", title: "eff.", hint: "effective tokens: (sum |A|)\u00b2 / sum A\u00b2" },
  { key: "flips", title: "flips", hint: "tokens whose advantage has the opposite sign of the base" },
];
export const OUTCOMES = [
  ["all", "all responses"],
  ["right", "right"],
  ["wrong", "wrong"],
  ["truncated", "truncated"],
  ["unscored", "not scored"],
  ["left out", "kept out of the loss"],
];
const ROW = 26;

/** The value of a row that a column shows. */
export function measure(page, rule, key, row) {
  if (key === "order") return row;
  if (key === "reward" || key === "length") return page.rows[key][row];
  return at(page.rules[rule]?.[key], row);
}

function fits(page, row, filter, rule) {
  const { rows, groups } = page;
  const group = groups[rows.group[row]];
  const outcome = {
    all: true,
    right: rows.success[row] === true,
    wrong: rows.success[row] === false,
    truncated: rows.truncated[row] === true,
    unscored: rows.reward[row] === null,
    "left out": rows.keep[row] === false,
  }[filter.outcome];
  if (!outcome) return false;
  const text = plain(filter.text.trim());
  if (text && ![group.key, group.id, group.prompt].some((t) => t && plain(t).includes(text))) {
    return false;
  }
  for (const [key, { least, most }] of Object.entries(filter.bounds)) {
    if (least === null && most === null) continue;
    const value = measure(page, rule, key, row);
    if (value === null) return false;
    if ((least !== null && value < least) || (most !== null && value > most)) return false;
  }
  return true;
}

const plain = (text) => text.normalize("NFC").toLowerCase();

/** The rows to list, in order; unknown values come last whatever the direction. */
export function ordered(page, filter, sort, rule) {
  const kept = [];
  for (let row = 0; row < page.rows.group.length; row += 1) {
    if (fits(page, row, filter, rule)) kept.push(row);
  }
  if (sort.key === "order" && !sort.down) return kept;
  const values = new Map(kept.map((row) => [row, measure(page, rule, sort.key, row)]));
  return kept.sort((a, b) => {
    const x = values.get(a);
    const y = values.get(b);
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return (sort.down ? y - x : x - y) || a - b;
  });
}

export function List({ page, rows, rule, selected, onSelect, sort, onSort, listRef }) {
  const scroller = useRef(null);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW,
    overscan: 12,
  });
  const place = useMemo(() => rows.indexOf(selected), [rows, selected]);
  const drawn = virtual.getVirtualItems();
  useEffect(() => {
    if (place >= 0) virtual.scrollToIndex(place, { align: "auto" });
  }, [selected]);
  // Another order, or a filter: the first ones are what is asked for.
  useEffect(() => virtual.scrollToIndex(0), [rows]);

  const onKeyDown = (event) => {
    const step = Math.max(1, Math.floor((scroller.current?.clientHeight ?? ROW) / ROW) - 1);
    const to = {
      ArrowDown: place + 1,
      ArrowUp: place - 1,
      PageDown: place + step,
      PageUp: place - step,
      Home: 0,
      End: rows.length - 1,
    }[event.key];
    if (to === undefined || !rows.length) return;
    event.preventDefault();
    onSelect(rows[Math.min(Math.max(to, 0), rows.length - 1)]);
  };

  const sign = (key) => (sort.key !== key ? "" : sort.down ? " \u25bc" : " \u25b2");
  return (
    <div class="list">
      <div class="row head">
        {COLUMNS.map(({ key, title, hint }) => (
          <button
            type="button"
            class={`cell ${key}`}
            title={`sort by ${hint}`}
            aria-pressed={sort.key === key}
            onClick={() => onSort(key)}
          >
            {title}
            {sign(key)}
          </button>
        ))}
      </div>
      <div
        class="rows"
        ref={(element) => {
          scroller.current = element;
          listRef.current = element;
        }}
        tabIndex={0}
        role="listbox"
        aria-label="responses"
        aria-activedescendant={
          drawn.some((item) => item.index === place) ? `row-${selected}` : undefined
        }
        onKeyDown={onKeyDown}
      >
        <div style={{ height: `${virtual.getTotalSize()}px`, position: "relative" }}>
          {drawn.map((item) => {
            const row = rows[item.index];
            const group = page.rows.group[row];
            const success = page.rows.success[row];
            return (
              <div
                key={row}
                id={`row-${row}`}
                role="option"
                aria-setsize={rows.length}
                aria-posinset={item.index + 1}
                aria-selected={row === selected}
                class={`row ${group % 2 ? "odd" : ""}`}
                style={{ transform: `translateY(${item.start}px)`, height: `${ROW}px` }}
                onClick={() => onSelect(row)}
              >
                {COLUMNS.map(({ key }) => (
                  <span class={`cell ${key}`}>
                    {key === "order"
                      ? `${row + 1}${success === null ? "" : success ? " \u2713" : " \u2717"}`
                      : short(measure(page, rule, key, row))}
                  </span>
                ))}
              </div>
            );
          })}
        </div>
      </div>
      <p class="count" role="status">
        {rows.length} of {page.rows.group.length} responses
        {rows.length ? "" : "; none fits"}
      </p>
    </div>
  );
}

const short = (value) => (value === null ? "\u2013" : shown(value, 4));
