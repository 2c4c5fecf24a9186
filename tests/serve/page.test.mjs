// Run by test_serve_page.py with `node --test`.
import assert from "node:assert/strict";
import { test } from "node:test";
import { events, messages, metricSums, newAnswer, perStep, ratio, rawText, runs, speed, summary, take } from "../../serve/page/chat.js";

const step = (drafted, accepted, tokens, text) => ({ choices: [{ delta: { content: text.join("") }, dflash: [{ drafted, accepted, tokens, text }] }] });
function answer(drafting, seconds, ...steps) {
  const found = newAnswer(drafting);
  steps.forEach((one, i) => take(found, one, 0.1 + (seconds * i) / (steps.length - 1 || 1)));
  return found;
}

test("each token has one of three kinds", () => {
  const found = answer(true, 1, step(0, 0, 1, ["", "a"]), step(3, 2, 3, ["bc", "d"]), step(3, 3, 4, ["efg", "h"]), step(0, 0, 1, ["", "i"]));
  assert.deepEqual(found.segments, [["own", "a"], ["accepted", "bc"], ["wrong", "d"], ["accepted", "efg"], ["own", "hi"]]);
  assert.equal(found.undrafted, 1);
  assert.equal(perStep(found), 8 / 3); // the first token is the prompt's
  assert.deepEqual({ ...found.lengths }, { 1: 1, 3: 1, 4: 1 });
});

test("no speed is shown before half a second", () => {
  const steps = [step(0, 0, 1, ["", "a"]), step(3, 1, 2, ["b", "c"])];
  assert.equal(speed(answer(true, 0.49, ...steps)), 0);
  assert.equal(speed(answer(true, 0.5, ...steps)).toFixed(6), "4.000000");
  assert.ok(!summary(answer(true, 0.1, ...steps), true).includes("a second"));
  assert.ok(!summary(answer(false, 1, ...steps), false).includes("step"));
});

test("the ratio compares two finished answers", () => {
  const first = step(0, 0, 1, ["", "a"]);
  const fast = answer(true, 1, first, step(3, 3, 4, ["bcd", "e"])), slow = answer(false, 2, first, step(0, 0, 4, ["", "bcde"]));
  assert.equal(ratio([fast, slow]).toFixed(6), "2.000000");
  assert.equal(ratio([fast]), 0);
  assert.equal(ratio([fast, { ...slow, note: "stopped" }]), 0);
  assert.equal(ratio([fast, { ...slow, seconds: 0.2 }]), 0);
});

test("a stopped answer stays in the conversation", () => {
  const partial = answer(true, 1, step(0, 0, 1, ["", "1, 2"]));
  const turns = [{ question: "Count.", answers: [{ ...partial, note: "stopped" }] }, { question: "lost", answers: [newAnswer(true)] }];
  assert.deepEqual(messages(turns, "Be brief.", "continue"), [
    { role: "system", content: "Be brief." }, { role: "user", content: "Count." },
    { role: "assistant", content: "1, 2" }, { role: "user", content: "continue" },
  ]);
});

test("an error in the stream keeps what came before it", () => {
  const found = answer(true, 1, step(0, 0, 1, ["", "half"]));
  assert.throws(() => take(found, { error: { message: "failed" } }, 1), /failed/);
  assert.equal(rawText(found), "half");
});

test("events are read across the borders of what arrives", () => {
  const [none, rest] = events('data: {"a"');
  assert.deepEqual(none, []);
  assert.deepEqual(events(`${rest}: 1}\n\ndata: [DONE]\n\n`), [[{ a: 1 }], ""]);
});

test("runs know which text is inside a code block", () => {
  const found = { segments: [["own", "see\n``"], ["accepted", "`py\nx = 1\n```\nend"], ["own", " ```no"]] };
  assert.deepEqual(runs(found), [
    ["own", "see\n", false], ["own", "``", true], ["accepted", "`py\nx = 1\n```", true], ["accepted", "\nend", false], ["own", " ```no", false],
  ]);
  assert.equal(runs({ segments: [["own", "```\nopen"]] })[0][2], true);
});

test("metrics are summed over their labels", () => {
  assert.deepEqual(metricSums('# HELP m x\nm{a="1"} 2\nm{a="2"} 3.5\nother 1\n', ["m"]), { m: 5.5 });
});
