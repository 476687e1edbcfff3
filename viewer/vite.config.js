// Builds src/ into one page, src/modtrace/views/html/page.html. The same sources give the same bytes.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig } from "vite";

const HERE = import.meta.dirname;
const PAGE = join(HERE, "../src/modtrace/views/html/page.html");
const NOT_BUILT_FROM = new Set(["node_modules", "test"]);

/** Lists the files that the page is built from, as paths with "/" below viewer/. */
function listSources(folder = "") {
  return readdirSync(join(HERE, folder))
    .filter((name) => !NOT_BUILT_FROM.has(name))
    .flatMap((name) => {
      const path = folder ? `${folder}/${name}` : name;
      return statSync(join(HERE, path)).isDirectory() ? listSources(path) : [path];
    });
}

/** The hash of the sources, which tests/views/html/test_page_is_built.py computes too: of each path and the bytes of its file. */
function hashSources() {
  const hash = createHash("sha256");
  for (const path of listSources().sort()) {
    const bytes = readFileSync(join(HERE, path));
    hash.update(`${path}\0${bytes.length}\0`).update(bytes);
  }
  return hash.digest("hex");
}

/** Puts the script and the style into template.html, and refuses a text that would end its own element. */
const onePage = {
  name: "one-page",
  writeBundle(_, bundle) {
    const parts = { hash: hashSources() };
    for (const file of Object.values(bundle)) {
      const text = String(file.type === "chunk" ? file.code : file.source).trim();
      if (/<\/(script|style)|<!--/i.test(text))
        throw new Error(`${file.fileName} would end its own element.`);
      parts[file.type === "chunk" ? "script" : "style"] = text;
    }
    const template = readFileSync(join(HERE, "template.html"), "utf8");
    writeFileSync(
      PAGE,
      template.replace(/%(hash|script|style)%/g, (_, part) => parts[part]),
    );
  },
};

export default defineConfig({
  plugins: [onePage],
  build: {
    target: "es2022",
    outDir: "../build/viewer",
    emptyOutDir: true,
    lib: {
      entry: "src/main.ts",
      formats: ["iife"],
      name: "report",
      fileName: () => "page.js",
      cssFileName: "page",
    },
  },
  test: { include: ["test/**/*.test.ts"], testTimeout: 120_000 },
});
