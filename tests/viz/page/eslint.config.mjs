// Rules for the program of interactive pages: `make page` checks its sources by them before it builds.
const browser = [
  "document", "window", "location", "history", "navigator", "localStorage", "matchMedia", "devicePixelRatio", "innerWidth", "innerHeight", "performance",
  "requestAnimationFrame", "setTimeout", "clearTimeout", "addEventListener", "atob", "btoa", "console", "Blob", "URL", "Response",
  "DecompressionStream", "CompressionStream", "ImageData", "TextDecoder", "TextEncoder", "HTMLElement", "Node", "ResizeObserver",
];

export default [{
  files: ["**/*.js"],
  ignores: ["**/built.js"],
  linterOptions: { reportUnusedDisableDirectives: "error" },
  languageOptions: { globals: Object.fromEntries(browser.map((name) => [name, "readonly"])) },
  rules: {
    "no-undef": "error", "no-unused-vars": ["error", { ignoreRestSiblings: true }], "no-const-assign": "error", "no-dupe-keys": "error",
    "no-dupe-class-members": "error", "no-dupe-args": "error", "no-unreachable": "error", "no-redeclare": "error", "no-self-assign": "error",
    "no-unused-private-class-members": "error", "no-fallthrough": "error", "no-cond-assign": "error", "no-sparse-arrays": "error",
    "no-unsafe-finally": "error", "no-unsafe-negation": "error", "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
    "prefer-const": "error", "no-var": "error", "eqeqeq": ["error", "always", { null: "ignore" }], "valid-typeof": "error", "use-isnan": "error",
    "no-throw-literal": "error", "no-implicit-globals": "error", "no-eval": "error", "no-new-func": "error",
  },
}];
