// How the search orders what it finds: titles first, guides before reference, records of the past last.
"use strict";
const PAST = ["CHANGELOG", "docs/lab-notes", "docs/benchmarks", "docs/evidence", "docs/gpus", "experiments/README"];
var Scorer = {
  score: ([docname, , , , score]) => {
    if (PAST.includes(docname)) return score - 30;
    const comesFirst = docname.startsWith("docs/guide/") || ["README", "docs/settings"].includes(docname);
    return comesFirst ? score + 10 : score;
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
