/** Starts the page: reads the payload that lies in it, and shows what is wrong if that cannot be. */

import "./style.css";
import { App } from "./app";
import { h } from "./dom";
import { decodePayload } from "./payload";

async function start(): Promise<void> {
  const began = performance.now();
  const element = document.getElementById("payload");
  if (!element?.textContent) throw new Error("There is no data in it.");
  const payload = await decodePayload(element.textContent);
  element.remove();
  new App(payload).start();
  document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
}

start().catch((error: unknown) => {
  const reason = error instanceof Error ? error.message : String(error);
  document.body.append(
    h("p", { class: "failure", role: "alert", text: `This report cannot be shown. ${reason}` }),
  );
});
