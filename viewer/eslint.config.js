import tseslint from "typescript-eslint";

const MARKUP = "The page shows texts of others: they are set as textContent alone.";

export default tseslint.config({ ignores: ["node_modules/"] }, ...tseslint.configs.strict, {
  rules: {
    "@typescript-eslint/no-non-null-assertion": "off",
    "no-restricted-properties": [
      "error",
      { property: "innerHTML", message: MARKUP },
      { property: "outerHTML", message: MARKUP },
      { property: "insertAdjacentHTML", message: MARKUP },
      { object: "document", property: "write", message: MARKUP },
    ],
    "no-restricted-globals": ["error", "eval", "fetch", "XMLHttpRequest", "WebSocket", "localStorage"],
    "max-lines": ["error", 400],
    eqeqeq: "error",
  },
});
