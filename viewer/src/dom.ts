/** Makes elements. Texts of the recording are set as text alone, never as markup. */

type Child = Node | string | null;

interface Options {
  class?: string;
  text?: string;
  title?: string;
  on?: Record<string, (event: Event) => void>;
  [attribute: string]: unknown;
}

/** Makes an element with its attributes, listeners and children. An attribute that is null or false is left out. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  options: Options = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = String(value);
    else if (name === "on") listen(element, value as NonNullable<Options["on"]>);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function listen(element: HTMLElement, listeners: Record<string, (event: Event) => void>): void {
  for (const [event, listener] of Object.entries(listeners)) element.addEventListener(event, listener);
}

/** Makes a button. One whose label is a sign alone, such as "?", has its title as its name. */
export function button(label: string, title: string, onClick: () => void): HTMLButtonElement {
  const name = label && !/[\p{L}\p{N}]/u.test(label) ? title : null;
  return h("button", { type: "button", text: label, title, "aria-label": name, on: { click: onClick } });
}

export interface Choice {
  value: string;
  text: string;
  /** The heading that it stands below, if there is one. */
  group?: string;
}

/** Makes a labelled choice. */
export function select(
  label: string,
  choices: readonly Choice[],
  chosen: string,
  onChange: (value: string) => void,
): HTMLLabelElement {
  const list = h("select", { "aria-label": label });
  const groups = new Map<string, HTMLOptGroupElement>();
  for (const { value, text, group } of choices) {
    const option = new Option(text, value, false, value === chosen);
    if (!group) list.append(option);
    else {
      const found = groups.get(group) ?? h("optgroup", { label: group });
      groups.set(group, found);
      found.append(option);
      list.append(found);
    }
  }
  list.addEventListener("change", () => {
    onChange(list.value);
  });
  return h("label", { class: "field" }, h("span", { text: label }), list);
}

/** Makes a table of texts, for a picture that somebody cannot see. */
export function textTable(
  caption: string,
  head: readonly string[],
  body: readonly (readonly string[])[],
): HTMLTableElement {
  const header = h("tr", {}, ...head.map((text) => h("th", { scope: "col", text })));
  const rows = body.map((cells) => h("tr", {}, ...cells.map((text) => h("td", { text }))));
  return h(
    "table",
    { class: "plain" },
    h("caption", { text: caption }),
    h("thead", {}, header),
    h("tbody", {}, ...rows),
  );
}

/** Puts children in place of those that are there. What has the focus has it afterwards too, or else `parent` has it. */
export function replaceChildren(parent: HTMLElement, ...children: Child[]): void {
  const { activeElement } = document;
  const focused = activeElement !== parent && parent.contains(activeElement) ? nameOf(activeElement!) : null;
  parent.replaceChildren(...children.filter((child) => child !== null));
  if (focused === null) return;
  const same = [...parent.querySelectorAll<HTMLElement>(FOCUSABLE)].find((each) => nameOf(each) === focused);
  (same ?? parent).focus({ preventScroll: true });
}

const FOCUSABLE = "button, input, select, summary, [tabindex]";

/** What tells an element that can have the focus from others beside it. */
function nameOf(element: Element): string {
  const named = element.tagName === "INPUT" ? (element.closest("label") ?? element) : element;
  return `${element.tagName} ${element.getAttribute("aria-label") ?? named.textContent}`;
}
