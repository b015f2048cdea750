// Shades: -levels .. levels, 0 only for the centre itself. As `level` of the Python package.

export function level(value, centre, range, levels) {
  const distance = value - centre;
  if (distance === 0) return 0;
  const share = Math.min(Math.abs(distance) / range, 1);
  const shade = Math.min(Math.max(Math.ceil(levels * share - 1e-5), 1), levels);
  return distance > 0 ? shade : -shade;
}

/** The class of a token by what is known of it. */
export function shadeClass(value, masked, scale, levels) {
  if (!masked) return "m";
  if (scale === null) return "";
  if (value === undefined || Number.isNaN(value)) return "u";
  const shade = level(value, scale.centre, scale.range, levels);
  return shade === 0 ? "z" : shade > 0 ? `p${shade}` : `n${-shade}`;
}

/** A number with the digits that float32 has, or a sign that it is unknown. */
export function shown(value, digits = 6) {
  if (value === null || value === undefined || Number.isNaN(value)) return "unknown";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const text = Number(value.toPrecision(digits));
  const size = Math.abs(text);
  return size !== 0 && (size < 1e-4 || size >= 1e7) ? text.toExponential() : String(text);
}
