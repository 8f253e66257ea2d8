// Texts as the policy reads them: a bubble for each turn, with its special tokens.
const ROLE = /<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*|<start_of_turn>(\w+)\n|<\|turn>(\w+)\n|<\|(user|assistant|system|observation|tool)\|>\n?|<｜(User|Assistant)｜>/g;
const TOKEN = /<[|｜][^<>\s]{1,40}[|｜]?>|<\/?s>|<(?:start|end)_of_turn>|<bos>|<eos>/g;
const CALL = /<tool_call>\s*(\{[^]*?\})\s*<\/tool_call>/g;

// Split a text at the matches of a pattern; `shown` returns what stands in the place of a match.
function marked(text, pattern, shown, rest = (part) => [part]) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    parts.push(...rest(text.slice(end, match.index)), shown(match));
    end = match.index + match[0].length;
  }
  return [...parts, ...rest(text.slice(end))].filter((part) => part !== "");
}

function shownCall([text, json]) {
  try {
    const call = JSON.parse(json), given = Object.entries(call.arguments).map(([name, value]) => `${name} = ${JSON.stringify(value)}`);
    return element("span", { className: "call", title: text }, `${call.name}(${given.join(", ")})`);
  } catch { return text; }
}

const shownToken = (token) => element("span", { className: "token" }, token);
const withTokens = (text) => marked(text, TOKEN, ([token]) => shownToken(token));
const shownText = (text) => marked(text, CALL, shownCall, withTokens);

// Bubbles of a text that one author wrote; a turn without a marker has the role `first`.
function turnsOf(text, author, first) {
  const turns = [], begun = [...text.matchAll(ROLE)];
  const before = text.slice(0, begun[0]?.index ?? text.length);
  if (before.trim()) turns.push([first, "", before]);
  begun.forEach((match, i) => {
    const body = text.slice(match.index + match[0].length, begun[i + 1]?.index ?? text.length);
    turns.push([match.slice(1).find(Boolean).toLowerCase(), match[0].trim().replace("\n", "⏎"), body]);
  });
  return turns.map(([role, marker, body]) => {
    const known = ["user", "assistant"].includes(role) ? role : "", shown = author === "sampled" ? "policy" : role;
    return element("div", { className: `turn ${author} ${known}` }, element("span", { className: "role" }, shown), shownToken(marker), marker && "\n", ...shownText(body.trim()));
  });
}

// The question: plain, or as turns if it has markers of roles.
function shownPrompt(text) {
  return text.search(ROLE) < 0 ? withTokens(text) : turnsOf(text, "given", "prompt");
}

// A response: what the policy sampled, set apart from what programs and tools wrote.
function shownResponse(c) {
  if (!c.parts) return withTokens(c.completion);
  let context = 1;
  return c.parts.flatMap(([author, text]) => [
    ...(author === "restart" ? [element("div", { className: "context" }, `context ${++context}: the policy sees nothing above`)] : []),
    ...turnsOf(text, author, author === "sampled" ? "policy" : "program or tool")]);
}
