/** Asks the server of a page for new steps while a run is recorded, and takes them over. */

export interface Progress {
  state: string;
  /** The number of the newest step; null for none. */
  last: number | null;
  ended: boolean;
  wait_ms: number;
}

/** After this time without a new step the page says so: the process may have been killed, which nobody writes down. */
const QUIET_MS = 30_000;
/** How often the server may not answer, one time after the other, until the page stops asking. */
const MOST_FAILURES = 5;

export class Follower {
  private since = performance.now();
  private failures = 0;

  /**
   * `element` says how far the run is, and `state` is that of what is shown. `take` shows a new payload, and returns whether it did: not while somebody types,
   * for example.
   */
  constructor(
    private readonly element: Pick<HTMLElement, "textContent">,
    private state: string,
    private readonly take: (payload: string) => Promise<boolean>,
    private readonly ask: (what: string) => Promise<string> = fetchText,
    private readonly wait: (milliseconds: number) => Promise<void> = sleep,
  ) {}

  async run(): Promise<void> {
    let pause = 1000;
    for (;;) {
      try {
        const progress = JSON.parse(await this.ask("state")) as Progress;
        if (progress.state !== this.state && (await this.take(await this.ask("payload")))) {
          this.state = progress.state;
          this.since = performance.now();
        }
        this.failures = 0;
        this.say(describe(progress, performance.now() - this.since));
        if (progress.ended && progress.state === this.state) return;
        pause = progress.wait_ms;
      } catch (error) {
        this.failures += 1;
        const reason = error instanceof Error ? error.message : String(error);
        const isOver = this.failures >= MOST_FAILURES;
        this.say(isOver ? `Not followed any more: ${reason}` : `No answer, asking again: ${reason}`);
        if (isOver) return;
      }
      await this.wait(pause);
    }
  }

  private say(text: string): void {
    if (this.element.textContent !== text) this.element.textContent = text;
  }
}

/** Says how far the run is. */
export function describe({ last, ended }: Progress, quietMs: number): string {
  const step = last === null ? "no step yet" : `step ${last}`;
  if (ended) return `The run has ended: ${step}.`;
  const quiet = Math.round(quietMs / 1000);
  return quietMs < QUIET_MS
    ? `Following the run: ${step}.`
    : `Following the run: ${step}, nothing new for ${quiet} s. It may have been killed.`;
}

async function fetchText(what: string): Promise<string> {
  let answer: Response;
  try {
    // eslint-disable-next-line no-restricted-globals -- of its own server, and only if that says so in the page
    answer = await fetch(what, { cache: "no-store" });
  } catch {
    throw new Error("the server has ended.");
  }
  const text = await answer.text();
  if (!answer.ok) throw new Error(text.slice(0, 300));
  return text;
}

function sleep(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
