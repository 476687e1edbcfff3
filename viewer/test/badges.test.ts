import { expect, test } from "vitest";
import { badgeOfModule, badgeOfNode } from "../src/badges";
import { Model } from "../src/model";
import { makePayload, readSample } from "./sample";

test("what raised an error is marked apart from what it was in", () => {
  const model = new Model(
    readSample(
      makePayload({
        modules: { label: ["Net", "fc", "head"], path: ["", "fc", "head"], parent: [-1, 0, 0] },
        nodes: {
          kind: ["module", "module", "op", "op", "module"],
          label: ["Net", "fc", "t", "addmm", "head"],
          parent: [-1, 0, 1, 1, 0],
          phase: ["forward", "forward", "forward", "forward", "forward"],
          module: [0, 1, 1, 1, 2],
          raised: [1, 1, 0, 1, 0],
        },
      }),
    ),
  );
  const nodes = [0, 1, 2, 3, 4].map((node) => badgeOfNode(model, node)?.title);
  const inside = "An error was raised inside.";
  expect(nodes).toEqual([inside, inside, undefined, "An error was raised here.", undefined]);
  const modules = [0, 1, 2].map((row) => badgeOfModule(model, row)?.title);
  expect(modules).toEqual([inside, "An error was raised here.", undefined]);
});
