// Bundles the page's script and style into the Python package. `npm ci && npm run build`.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const assets = "../src/tokencredit/viewer/assets";
const licence = (name) => readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
const bundled = ["preact", "@tanstack/virtual-core", "@tanstack/react-virtual"];

await build({
  entryPoints: { page: "source/page.jsx" },
  outdir: assets,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome123", "firefox120", "safari17.5"],
  charset: "ascii",
  jsx: "automatic",
  jsxImportSource: "preact",
  alias: { react: "preact/compat", "react-dom": "preact/compat" },
  define: { "process.env.NODE_ENV": '"production"' },
  legalComments: "none",
});
// Inside <script>, nothing may look like its end.
const script = readFileSync(`${assets}/page.js`, "utf8");
if (/<\/script|<!--/i.test(script)) throw new Error("the script would end too early in a page");
await build({
  entryPoints: { page: "source/page.css" },
  outdir: assets,
  minify: true,
  charset: "utf8",
});
const parts = bundled.map((name) => {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  return `${name} ${version}\n\n${licence(name)}\n`;
});
writeFileSync(`${assets}/LICENSES.txt`, `page.js contains:\n\n${parts.join("\n---\n\n")}`);
