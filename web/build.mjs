// Bundles the pages into the package, writes the front page of the documentation site, and writes down of which sources: tests/server/pages/test_built.py reads that.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, rmSync, writeFileSync, mkdirSync } from "node:fs";
import { join, relative } from "node:path";
import { build } from "esbuild";

const here = import.meta.dirname;
const out = join(here, "../src/outrider/server/pages/built");
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });

const result = await build({
  entryPoints: [join(here, "src/playground.ts"), join(here, "src/learn.ts"), join(here, "src/style.css")],
  bundle: true,
  splitting: true,
  format: "esm",
  minify: true,
  charset: "utf8",
  target: ["chrome120", "firefox121", "safari17.2"],
  entryNames: "[name]-[hash]",
  chunkNames: "shared-[hash]",
  outdir: out,
  metafile: true,
});

const nameOf = (source) =>
  Object.entries(result.metafile.outputs).find(([, made]) => made.entryPoint?.endsWith(source))[0].split("/").at(-1);
const icon = readFileSync(join(here, "src/icon.svg"));
const iconName = `icon-${createHash("sha256").update(icon).digest("hex").slice(0, 8)}.svg`;
writeFileSync(join(out, iconName), icon);

/** A page with the addresses of what it loads; parts for the other of server and site are left out. */
function page(source, script, kind, folder) {
  const other = kind === "site" ? "server" : "site";
  return readFileSync(join(here, "src", source), "utf8")
    .replace(new RegExp(`\\n *<!-- ${other} -->.*?<!-- end -->`, "gs"), "")
    .replace(/<!-- (server|site|end) -->/g, "")
    .replace("%style%", `${folder}/${nameOf("style.css")}`)
    .replace("%script%", `${folder}/${nameOf(script)}`)
    .replaceAll("%icon%", `${folder}/${iconName}`)
    .replace("%home%", kind === "site" ? "./" : "/")
    .replace("%site%", kind === "site" ? " data-site" : "");
}

writeFileSync(join(out, "index.html"), page("index.html", "playground.ts", "server", "/assets"));
writeFileSync(join(out, "learn.html"), page("learn.html", "learn.ts", "server", "/assets"));
const front = join(here, "../docs/front.html");
writeFileSync(front, page("learn.html", "learn.ts", "site", "learn"));

/** Digest of files, by name and content; tests/server/pages/test_built.py does the same. */
function digest(folder, files) {
  const found = createHash("sha256");
  for (const file of files.toSorted()) {
    found.update(relative(folder, file).replaceAll("\\", "/")).update("\0").update(readFileSync(file)).update("\0");
  }
  return found.digest("hex");
}

const sources = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile())
  .map((entry) => join(entry.parentPath, entry.name));
const settings = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"].map((name) => join(here, name));
const built = readdirSync(out).map((name) => join(out, name));
const digests = { sources: digest(here, [...sources, ...settings]), built: digest(out, built), front: digest(join(here, ".."), [front]) };
writeFileSync(join(out, "digests.json"), `${JSON.stringify(digests, null, 2)}\n`);
const bytes = built.reduce((sum, file) => sum + readFileSync(file).length, 0);
console.log(`${built.length} files, ${(bytes / 1000).toFixed(1)} kB`);
