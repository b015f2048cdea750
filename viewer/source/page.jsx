// The page: what to colour by, the list of responses, the chosen one among its siblings, and every
// number of the token under the pointer or the focus.
import { render } from "preact";
import { flushSync } from "preact/compat";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { at, readPage } from "./data.js";
import { ends, quantile, shown } from "./colour.js";
import { COLUMNS, List, OUTCOMES, ordered } from "./list.jsx";
import { Columns, WIDTHS, columnItems, laneValues, tokenId } from "./columns.jsx";

/** What the columns are coloured by: one series, or two and their difference. */
function lanesOf(page, group, by, against) {
  const first = page.byKey.get(by);
  if (!first) return [{ id: "text", key: null, title: "text", scale: null, rule: null }];
  const second = against === by ? undefined : page.byKey.get(against);
  const alike = second && second.kind === first.kind;
  const range = alike ? Math.max(first.range, second.range) : null;
  const rule = first.rule ?? Object.keys(page.rules)[0];
  const lane = (id, series) => ({
    id,
    key: series.key,
    title: series.title,
    credit: series.rule !== null,
    rule: series.rule ?? rule,
    scale: { ...series, range: range ?? series.range, whole: range === null },
  });
  if (!second) return [lane("a", first)];
  const lanes = [lane("a", first), lane("b", second)];
  if (alike) {
    const difference = {
      id: "d",
      key: first.key,
      minus: second.key,
      title: `${first.title} \u2212 ${second.title}`,
      rule,
    };
    // Two methods may differ by little where they agree on much: a scale of its own.
    const values = (group?.responses ?? []).flatMap((response) => {
      const found = laneValues(difference, response);
      return found ? [...found].filter((_, i) => response.mask[i] === 1) : [];
    });
    difference.scale = { range: quantile(values, page.quantile), factor: false, here: true };
    lanes.push(difference);
  }
  return lanes;
}

function Legend({ lanes, page }) {
  const scales = [];
  for (const lane of lanes) {
    if (!lane.scale) continue;
    const same = scales.find((one) => !one.scale.whole && !lane.scale.here && !one.scale.here);
    if (same && !lane.scale.whole) same.titles.push(lane.title);
    else scales.push({ scale: lane.scale, titles: [lane.title] });
  }
  return (
    <div class="legend" role="group" aria-label="scale">
      {scales.map((one) => (
        <Scale {...one} page={page} />
      ))}
      <div class="kinds">
        <span class="t z">
          {lanes[0].scale ? `exactly ${lanes[0].scale.factor ? 1 : 0}` : "text"}
        </span>
        <span class="t u">unknown</span>
        <span class="t m">outside the mask</span>
        <span class="t k1">special</span>
        <span class="t parting">first token that differs</span>
      </div>
    </div>
  );
}

function Scale({ scale, titles, page }) {
  const centre = scale.factor ? 1 : 0;
  // A series that lies on one side of its centre needs one half of the colours.
  const above = !scale.whole || scale.least === null || scale.most > centre;
  const below = !scale.whole || scale.least === null || scale.least < centre;
  const both = above === below;
  const shades = [];
  for (let k = below || both ? -page.levels : 0; k <= (above || both ? page.levels : 0); k += 1) {
    shades.push(<span class={`swatch ${k === 0 ? "z" : k > 0 ? `p${k}` : `n${-k}`}`} />);
  }
  const [low, high] = ends(scale);
  const digits = scale.factor ? 6 : 4; // weights may all be near one
  return (
    <div class="scale">
      <b>{titles.join(", ")}</b>
      <span class="number">{below || both ? shown(low, digits) : centre}</span>
      <span class="shades">{shades}</span>
      <span class="number">{above || both ? shown(high, digits) : centre}</span>
      {scale.unit && <span>{scale.unit}</span>}
      <span class="note">
        {scale.here
          ? `${Math.round(100 * page.quantile)} % of this group's values other than 0 are within`
          : scale.whole && scale.least !== null
            ? `${Math.round(100 * page.quantile)} % of the values other than ${centre} are within; ` +
              `all from ${shown(scale.least, 4)} to ${shown(scale.most, 4)}`
            : scale.whole
              ? ""
              : "the wider of the two scales"}
      </span>
    </div>
  );
}

function Inspector({ page, token, group, lanes }) {
  if (!token || !group) {
    return <aside class="inspector">Point at a token, or move to it with the arrow keys.</aside>;
  }
  const response = group.responses[token.row - page.groups[page.rows.group[token.row]].first];
  const { i } = token;
  const [text, kind, id, raw] = page.vocabulary[response.codes[i]];
  const masked = response.mask[i] === 1;
  let position = -1;
  for (let k = 0; k <= i; k += 1) position += response.mask[k];
  return (
    <aside class="inspector" aria-live="polite">
      <div class="token">
        <bdi class={`t k${kind}`}>{text}</bdi>
        <span>
          response {token.row + 1}, token {i + 1} of {response.codes.length}
          {masked ? `, position ${position}` : ", outside the mask"}
          {id === null ? "" : `, id ${id}`}
          {raw === null ? "" : `, bytes ${raw.map((b) => b.toString(16).padStart(2, "0")).join(" ")}`}
        </span>
      </div>
      <dl>
        {page.series.map((series) => (
          <div class="pair">
            <dt>{series.title}</dt>
            <dd>{shown(response.values.get(series.key)?.[i])}</dd>
          </div>
        ))}
        {lanes
          .filter((lane) => lane.minus !== undefined)
          .map((lane) => (
            <div class="pair">
              <dt>{lane.title}</dt>
              <dd>{shown(laneValues(lane, response)?.[i])}</dd>
            </div>
          ))}
        {Object.entries(page.rules).map(([rule, columns]) => (
          <div class="pair">
            <dt>{page.titles[rule]} base</dt>
            <dd>{shown(at(columns.base, token.row))}</dd>
          </div>
        ))}
      </dl>
    </aside>
  );
}

function Filter({ filter, onFilter, textRef, listRef }) {
  const bound = (key, end) => (event) => {
    const text = event.currentTarget.value.trim();
    const value = text === "" || Number.isNaN(Number(text)) ? null : Number(text);
    const old = filter.bounds[key] ?? { least: null, most: null };
    onFilter({ ...filter, bounds: { ...filter.bounds, [key]: { ...old, [end]: value } } });
  };
  return (
    <div class="filter">
      <input
        type="search"
        ref={textRef}
        placeholder="search"
        aria-label="group or prompt contains"
        onInput={(event) => onFilter({ ...filter, text: event.currentTarget.value })}
        onKeyDown={(event) => event.key === "Escape" && listRef.current?.focus()}
      />
      <select
        aria-label="outcome"
        onChange={(event) => onFilter({ ...filter, outcome: event.currentTarget.value })}
      >
        {OUTCOMES.map(([value, title]) => (
          <option value={value}>{title}</option>
        ))}
      </select>
      <details>
        <summary>bounds</summary>
        {COLUMNS.slice(1).map(({ key, title, hint }) => (
          <div class="bounds" title={hint}>
            <span>{title}</span>
            <input type="number" step="any" aria-label={`${title} at least`} placeholder="least" onInput={bound(key, "least")} />
            <input type="number" step="any" aria-label={`${title} at most`} placeholder="most" onInput={bound(key, "most")} />
          </div>
        ))}
      </details>
    </div>
  );
}

function Choice({ label, value, onChange, options }) {
  return (
    <label>
      {label}{" "}
      <select aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([key, title]) => (
          <option value={key}>{title}</option>
        ))}
      </select>
    </label>
  );
}

function App({ page }) {
  const [by, setBy] = useState(page.by ?? "");
  const [against, setAgainst] = useState(page.against ?? "");
  const [selected, setSelected] = useState(0);
  const [sort, setSort] = useState({ key: "order", down: false });
  const [filter, setFilter] = useState({ text: "", outcome: "all", bounds: {} });
  const [layout, setLayout] = useState("group");
  const [width, setWidth] = useState("medium");
  const [theme, setTheme] = useState("auto");
  const [token, setToken] = useState(null);
  const [printing, setPrinting] = useState(false);
  const [, redraw] = useState(0);
  const listRef = useRef(null);
  const textRef = useRef(null);
  const focusRef = useRef(false);

  const rule = page.byKey.get(by)?.rule ?? Object.keys(page.rules)[0];
  const rows = useMemo(() => ordered(page, filter, sort, rule), [filter, sort, rule]);
  const number = page.rows.group[selected];
  const entry = page.load(number);
  useEffect(() => {
    let wanted = true;
    entry.promise.then(() => wanted && redraw((n) => n + 1));
    return () => {
      wanted = false;
    };
  }, [number]);
  const { group } = entry;
  const lanes = useMemo(() => lanesOf(page, group, by, against), [group, by, against]);

  const onToken = setToken;
  // Drawn anew, a token loses what was set on its element: it is set after every drawing.
  useLayoutEffect(() => {
    document.querySelectorAll(".t.current").forEach((one) => one.classList.remove("current"));
    if (!token) return;
    document.getElementById(tokenId(token.row, token.lane, token.i))?.classList.add("current");
  });
  const onSelect = useCallback((row) => {
    setSelected(row);
    setToken(null);
  }, []);
  const onSort = (key) =>
    setSort((old) => ({ key, down: old.key === key ? !old.down : key !== "order" }));

  useEffect(() => {
    const before = () => flushSync(() => setPrinting(true));
    const after = () => setPrinting(false);
    addEventListener("beforeprint", before);
    addEventListener("afterprint", after);
    const onKey = (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") {
        event.preventDefault();
        textRef.current?.focus();
      } else if (event.key === "l") listRef.current?.focus();
      else if (event.key === "t") {
        const tokens = document.querySelector(".reference .tokens");
        // At once where they are drawn: the next key may follow before the next drawing.
        if (tokens) tokens.focus();
        else {
          focusRef.current = true;
          redraw((n) => n + 1);
        }
      }
    };
    addEventListener("keydown", onKey);
    return () => {
      removeEventListener("beforeprint", before);
      removeEventListener("afterprint", after);
      removeEventListener("keydown", onKey);
    };
  }, []);
  useLayoutEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }, [theme]);

  const items = useMemo(
    () => (group ? columnItems(page, group, number, selected, lanes, layout === "response") : []),
    [group, selected, lanes, layout],
  );
  const series = page.series.map((one) => [one.key, one.title]);
  const { key, id, step, prompt, count } = page.groups[number];
  return (
    <>
      <header class="top">
        <h1>
          {page.title} <small>tokencredit view</small>
        </h1>
        <details class="facts">
          <summary>where this comes from</summary>
          <dl>
            {page.facts.map(([name, value]) => (
              <>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </>
            ))}
          </dl>
        </details>
        <details class="facts keys">
          <summary>keys</summary>
          <dl>
            <dt>/</dt>
            <dd>search groups and prompts; Escape goes to the list</dd>
            <dt>l</dt>
            <dd>to the list: arrow keys, Page Up and Down, Home, End</dd>
            <dt>t</dt>
            <dd>to the tokens of the chosen response: arrow keys, Home, End; Tab to its sibling</dd>
          </dl>
        </details>
        <div class="choices">
          <Choice label="colour by" value={by} onChange={setBy} options={series.length ? series : [["", "nothing recorded"]]} />
          <Choice label="beside" value={against} onChange={setAgainst} options={[["", "nothing"], ...series]} />
          <Choice
            label="show"
            value={layout}
            onChange={setLayout}
            options={[
              ["group", "all siblings"],
              ["response", "this response"],
            ]}
          />
          <Choice label="columns" value={width} onChange={setWidth} options={Object.keys(WIDTHS).map((w) => [w, w])} />
          <Choice label="theme" value={theme} onChange={setTheme} options={["auto", "light", "dark"].map((t) => [t, t])} />
        </div>
        <Legend lanes={lanes} page={page} />
      </header>
      <nav>
        <Filter filter={filter} onFilter={setFilter} textRef={textRef} listRef={listRef} />
        <List {...{ page, rows, rule, selected, onSelect, sort, onSort, listRef }} />
      </nav>
      <main>
        <div class="prompt">
          <p>
            group <b>{key}</b>
            {id === null ? "" : `, prompt ${id}`}
            {step === null ? "" : `, step ${step}`}, {count} {count === 1 ? "response" : "responses"}
          </p>
          {prompt && <pre>{prompt}</pre>}
        </div>
        {group ? (
          <Columns
            {...{ page, items, printing, onToken, onSelect, focusRef }}
            shared={layout === "group" ? group.shared : 0}
            width={WIDTHS[width]}
          />
        ) : (
          <p class="wait">Unpacking ...</p>
        )}
      </main>
      <Inspector {...{ page, token, group, lanes }} />
    </>
  );
}

const place = document.getElementById("page");
place.replaceChildren();
const page = readPage();
/** How many facts stand above the tokens in a column of a lane's own rule. */
page.factLines = ({ rule }) => {
  const columns = page.rules[rule];
  if (!columns) return 0;
  const shaped = columns.reward.some((value) => value !== null) ? 1 : 0;
  return 5 + shaped + (page.rewards.length > 1 ? page.rewards.length : 0);
};
render(<App page={page} />, place);
