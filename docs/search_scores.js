// How Sphinx's search orders what it finds: titles with the words that were typed first, long lists of everything last.
const WORDS = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
const LAST = /^(README|CHANGELOG|CONTRIBUTING|docs\/(index|messages|limits|vocabulary|promises|how-it-works))$/;

var Scorer = {
  score: ([page, title, , , score]) => {
    const parts = title.toLowerCase().split(/\W+/);
    const named = WORDS.filter((word) => parts.some((part) => part.startsWith(word)));
    const inTitle = named.reduce((sum, word) => sum + 30 + (30 * word.length) / title.length, 0);
    return score + inTitle - (LAST.test(page) ? 20 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
