// Asks the search of a built site, as its pages do: node search.js SITE QUERY...  Prints JSON: for each query, locations, best first.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));
let receive, answer;
const page = vm.createContext({ console });
page.self = page;
page.addEventListener = (_, listener) => (receive = listener);
page.postMessage = (x) => answer(x);
vm.runInContext(fs.readFileSync(path.join(folder, worker), "utf8"), page);
const ask = (message) => new Promise((resolve) => { answer = resolve; receive({ data: message }); });
(async () => {
  await ask({ type: 0, data: { ...index, options: { suggest: false } } });
  const found = {};
  for (const query of queries) found[query] = (await ask({ type: 2, data: query })).data.items.map((x) => x[0].location);
  console.log(JSON.stringify(found));
})();
