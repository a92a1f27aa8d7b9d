// Builds the page into the Python package: three files with fixed names, and the licences of what is inside.
import { readFileSync, existsSync } from "node:fs";
import { resolve } from "node:path";
import { defineConfig } from "vite";

const here = import.meta.dirname;

// What is bundled must travel with its licence.
function licenses() {
  return {
    name: "licenses",
    generateBundle() {
      const manifest = JSON.parse(readFileSync(resolve(here, "package.json"), "utf8"));
      const parts = Object.keys(manifest.dependencies).map((name) => {
        const folder = resolve(here, "node_modules", name);
        const file = ["LICENSE", "LICENSE.md", "license"].map((n) => resolve(folder, n)).find(existsSync);
        const { version } = JSON.parse(readFileSync(resolve(folder, "package.json"), "utf8"));
        return `${name} ${version}\n\n${file ? readFileSync(file, "utf8") : ""}`;
      });
      this.emitFile({ type: "asset", fileName: "licenses.txt", source: parts.join("\n----\n\n") });
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [licenses()],
  build: {
    outDir: resolve(here, "../src/torchtap/viewer/static"),
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "app.js",
        assetFileNames: "app[extname]",
        codeSplitting: false,
      },
    },
  },
});
