/** Starts the page: reads the payload that lies in it, and shows what is wrong if that cannot be. */

import "./style.css";
import { App } from "./app";
import { h } from "./dom";
import { Follower } from "./follow";
import { decodePayload } from "./payload";

async function start(): Promise<void> {
  const began = performance.now();
  const element = document.getElementById("payload");
  if (!element?.textContent) throw new Error("There is no data in it.");
  const payload = await decodePayload(element.textContent);
  const { follow } = element.dataset;
  element.remove();
  let app = new App(payload);
  app.start();
  document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
  if (follow === undefined) return;
  const progress = h("p", { class: "follow", role: "status" });
  const follower = new Follower(progress, follow, async (text) => {
    if (app.isBusy) return false;
    const next = new App(await decodePayload(text), app);
    app.stop();
    app = next;
    app.start();
    app.append(progress);
    return true;
  });
  app.append(progress);
  void follower.run();
}

start().catch((error: unknown) => {
  const reason = error instanceof Error ? error.message : String(error);
  document.body.append(
    h("p", { class: "failure", role: "alert", text: `This report cannot be shown. ${reason}` }),
  );
});
