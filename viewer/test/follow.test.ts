import { expect, test } from "vitest";
import { describe, Follower } from "../src/follow";

/** Follows a server whose answers are these, and returns what was taken over and how often it waited. */
async function follow(answers: (string | Error)[], isBusy: boolean[] = []) {
  const taken: string[] = [];
  const said: string[] = [];
  let waits = 0;
  const element = { textContent: "" };
  const take = (payload: string) => {
    if (isBusy.shift()) return Promise.resolve(false);
    taken.push(payload);
    return Promise.resolve(true);
  };
  const ask = (what: string) => {
    if (what === "payload") return Promise.resolve(`payload ${taken.length}`);
    const answer = answers.shift() ?? new Error("over");
    return answer instanceof Error ? Promise.reject(answer) : Promise.resolve(answer);
  };
  const wait = () => {
    waits += 1;
    said.push(element.textContent);
    return Promise.resolve();
  };
  const follower = new Follower(element, "", take, ask, wait);
  await follower.run();
  said.push(element.textContent);
  return { taken, said, waits };
}

const progress = (last: number | null, ended = false) =>
  JSON.stringify({ state: `${last} ${ended}`, last, ended, wait_ms: 1 });

test("new steps are taken over once each, until the run has ended", async () => {
  const { taken, said } = await follow([progress(null), progress(3), progress(3), progress(4, true)]);
  expect(taken.length).toBe(3);
  expect(said).toEqual([
    "Following the run: no step yet.",
    "Following the run: step 3.",
    "Following the run: step 3.",
    "The run has ended: step 4.",
  ]);
});

test("while somebody types nothing is taken over, and what came meanwhile is later", async () => {
  const { taken, waits } = await follow([progress(1), progress(2, true), progress(2, true)], [false, true]);
  expect(taken.length).toBe(2);
  expect(waits).toBe(2);
});

test("a server that does not answer is asked some times more", async () => {
  const once = await follow([new Error("busy"), progress(1, true)]);
  expect(once.said).toEqual(["No answer, asking again: busy", "The run has ended: step 1."]);
  const never = await follow([]);
  expect(never.said.at(-1)).toBe("Not followed any more: over");
  expect(never.waits).toBe(4);
});

test("a run that brings nothing new for long is said to be so", () => {
  const running = { state: "", last: 7, ended: false, wait_ms: 1 };
  expect(describe(running, 29_000)).toBe("Following the run: step 7.");
  expect(describe(running, 61_000)).toBe(
    "Following the run: step 7, nothing new for 61 s. It may have been killed.",
  );
});
