// Drives Chromium for tests/helpers/driven.py: a command a line comes in as JSON, and its answer goes out the same way.
import { createInterface } from "node:readline";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const [executablePath, ...args] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args });
let page = null;
/** What must not happen: errors, and requests for anything but the file itself. */
let problems = [];

const COMMANDS = {
  async open({ url, width, height, scheme, reduced }) {
    await page?.context().close();
    problems = [];
    const context = await browser.newContext({
      viewport: { width, height },
      colorScheme: scheme,
      reducedMotion: reduced ? "reduce" : "no-preference",
    });
    page = await context.newPage();
    page.on("console", (each) => {
      if (["error", "warning"].includes(each.type())) problems.push(`console: ${each.text()}`);
    });
    page.on("pageerror", (each) => problems.push(`error: ${each.stack ?? each.message}`));
    page.on("dialog", (each) => {
      problems.push(`dialog: ${each.message()}`);
      each.dismiss();
    });
    page.on("request", (each) => {
      if (!/^(file|data|blob):/.test(each.url())) problems.push(`request: ${each.url()}`);
    });
    await page.goto(url);
  },
  evaluate: ({ code }) => page.evaluate(code),
  async wait({ code }) {
    // Asked again and again from here: the policy of the page forbids what waitForFunction does.
    for (const end = Date.now() + 60_000; !(await page.evaluate(code)); ) {
      if (Date.now() > end) throw new Error(`never true: ${code}`);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  },
  click: ({ role, name }) => page.getByRole(role, { name: new RegExp(`^${name}( \\(\\d+\\))?$`) }).first().click({ timeout: 10_000 }),
  press: ({ keys }) => keys.reduce((before, key) => before.then(() => page.keyboard.press(key)), Promise.resolve()),
  async mouse({ x, y, right = 0, down = 0, clicks = 0 }) {
    if (clicks) return page.mouse.click(x, y, { clickCount: clicks, delay: 20 });
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.move(x + right, y + down, { steps: 4 });
    await page.mouse.up();
  },
  type: ({ text }) => page.keyboard.type(text),
  choose: ({ name, option }) => page.getByRole("combobox", { name }).selectOption({ label: option }),
  back: () => page.goBack().then(() => null),
  forward: () => page.goForward().then(() => null),
  screenshot: ({ path }) => page.screenshot({ path }).then(() => null),
  print: ({ path }) => page.pdf({ path, preferCSSPageSize: true }).then(() => null),
  async frame({ wait, click }) {
    const frame = page.frameLocator("iframe");
    await frame.locator(wait).first().waitFor({ timeout: 30_000 });
    await frame.getByRole("tab", { name: click }).click();
    return frame.locator("body").innerText();
  },
  problems: () => problems,
  async axe() {
    // Run from here, because the policy of the page lets no script in: this one comes with the debugger.
    await page.evaluate(AXE);
    const found = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
    return found.violations
      .filter((each) => ["serious", "critical"].includes(each.impact))
      .map((each) => `${each.id}: ${each.nodes.map((node) => node.html.slice(0, 200)).join(" | ")}`);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...given } = JSON.parse(line);
  try {
    process.stdout.write(`${JSON.stringify({ answer: (await COMMANDS[command](given)) ?? null })}\n`);
  } catch (error) {
    process.stdout.write(`${JSON.stringify({ error: String(error.stack ?? error) })}\n`);
  }
}
await browser.close();
