// Shades: -levels .. levels, 0 only for the centre itself. As `level` of the Python package.

export function level(value, { range, factor }, levels) {
  const distance = factor ? (value > 0 ? Math.log(value) : -Infinity) : value;
  if (distance === 0) return 0;
  const share = Math.min(Math.abs(distance) / range, 1);
  const shade = Math.min(Math.max(Math.ceil(levels * share - 1e-5), 1), levels);
  return distance > 0 ? shade : -shade;
}

/** The values that are drawn in the strongest colours. */
export function ends({ range, factor }) {
  return factor ? [Math.exp(-range), Math.exp(range)] : [-range, range];
}

/** The class of a token by what is known of it. */
export function shadeClass(value, masked, scale, levels) {
  if (!masked) return "m";
  if (scale === null) return "";
  if (value === undefined || Number.isNaN(value)) return "u";
  const shade = level(value, scale, levels);
  return shade === 0 ? "z" : shade > 0 ? `p${shade}` : `n${-shade}`;
}

/** A number in words: with so many digits, or with those that float32 has. */
export function shown(value, digits = null) {
  if (value === null || value === undefined || Number.isNaN(value)) return "unknown";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  let text = Number(value.toPrecision(digits ?? 6));
  for (let more = 7; digits === null && more < 10 && !same(text, value); more += 1) {
    text = Number(value.toPrecision(more));
  }
  const size = Math.abs(text);
  return size !== 0 && (size < 1e-4 || size >= 1e9) ? text.toExponential() : String(text);
}

const same = (a, b) => Math.fround(a) === Math.fround(b);

/** The distance from 0 that a share of the numbers that are not 0 does not exceed. */
export function quantile(values, share) {
  const sizes = values.filter((v) => v !== 0 && !Number.isNaN(v)).map(Math.abs).sort();
  return sizes.length ? sizes[Math.min(Math.ceil(share * sizes.length), sizes.length) - 1] : 1;
}
