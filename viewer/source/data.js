// What the page holds: an index of all responses, and one compressed block a group.

/** @param {string} text base64 of a zlib stream */
async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Numbers are stored as their first bytes, then their second ones and so on. */
function joined(buffer, offset, count) {
  const planes = new Uint8Array(buffer, offset, 4 * count);
  const bytes = new Uint8Array(4 * count);
  for (let k = 0; k < 4; k += 1) {
    for (let i = 0; i < count; i += 1) bytes[4 * i + k] = planes[k * count + i];
  }
  return new DataView(bytes.buffer);
}

function floats(buffer, offset, count) {
  const view = joined(buffer, offset, count);
  return Float32Array.from({ length: count }, (_, i) => view.getFloat32(4 * i, true));
}

function codes(buffer, offset, count) {
  const view = joined(buffer, offset, count);
  return Uint32Array.from({ length: count }, (_, i) => view.getUint32(4 * i, true));
}

/** One group: for each response its codes, mask, and the series that it has. */
function group(buffer, vocabulary) {
  const headed = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headed)));
  const total = header.lengths.reduce((sum, length) => sum + length, 0);
  let offset = 4 + headed;
  const all = codes(buffer, offset, total);
  offset += 4 * total;
  const mask = new Uint8Array(buffer, offset, total);
  offset += total + ((4 - (total % 4)) % 4);
  const series = header.series.map((key, k) => {
    const values = floats(buffer, offset + 4 * total * k, total);
    return { key, values, has: new Set(header.has[k]) };
  });
  let start = 0;
  const responses = header.lengths.map((length, row) => {
    const end = start + length;
    const values = new Map();
    for (const one of series) {
      if (one.has.has(row)) values.set(one.key, one.values.subarray(start, end));
    }
    const response = { codes: all.subarray(start, end), mask: mask.subarray(start, end), values };
    start = end;
    return response;
  });
  const others = responses.slice(1).map((one) => divergence(vocabulary, responses[0], one));
  const shared = others.length ? others.reduce((n, one) => Math.min(n, one.same), Infinity) : 0;
  return { responses, shared };
}

/**
 * How many tokens two responses begin with, and the place of the first that differs: -1 if there
 * is none, or it cannot be told. As `parting` of the Python package.
 */
export function divergence(vocabulary, { codes: a }, { codes: b }) {
  const end = Math.min(a.length, b.length);
  for (let i = 0; i < end; i += 1) {
    if (a[i] === b[i] && known(vocabulary[a[i]])) continue;
    const [, , idA, , textA] = vocabulary[a[i]];
    const [, , idB, , textB] = vocabulary[b[i]];
    const ids = idA !== null && idB !== null;
    if (!ids && (textA === null || textB === null)) return { same: i, place: -1 };
    if (ids ? idA !== idB : textA !== textB) return { same: i, place: i };
  }
  return { same: end, place: a.length === b.length ? -1 : end };
}

const known = ([, , id, , text]) => id !== null || text !== null;

const AT_ONCE = 12;

/** Reads the page; blocks are unpacked when they are asked for, and the last few kept. */
export function readPage() {
  const index = JSON.parse(document.getElementById("index").textContent);
  const blocks = [...document.querySelectorAll("script.group")];
  const kept = new Map();
  const byKey = new Map(index.series.map((one) => [one.key, one]));
  return {
    ...index,
    byKey,
    /** @returns {Promise} of the group with this number. */
    load(number) {
      let found = kept.get(number);
      kept.delete(number);
      if (!found) {
        const entry = {};
        entry.promise = unpacked(blocks[number].textContent).then((buffer) => {
          entry.group = group(buffer, index.vocabulary);
          return entry.group;
        });
        found = entry;
      }
      kept.set(number, found);
      if (kept.size > AT_ONCE) kept.delete(kept.keys().next().value);
      return found;
    },
  };
}

/** Column of the rows that may end early: what is missing is unknown. */
export const at = (column, row) => column?.[row] ?? null;
