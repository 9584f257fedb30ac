// Light or dark. Runs before the page is drawn, hence a classic script. The page follows the system until the
// user picks the other one; picking the system's own again returns to following it.

(() => {
  const KEY = 'ingot.theme';
  const system = matchMedia('(prefers-color-scheme: dark)');
  const stored = () => ['light', 'dark'].find((theme) => theme === localStorage.getItem(KEY));
  const systemTheme = () => (system.matches ? 'dark' : 'light');
  const current = () => stored() ?? systemTheme();

  function apply() {
    document.documentElement.dataset.theme = current();
  }

  function toggle() {
    const next = current() === 'dark' ? 'light' : 'dark';
    if (next === systemTheme()) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
    apply();
  }

  apply();
  system.addEventListener('change', apply);
  addEventListener('storage', (event) => event.key === KEY && apply());
  addEventListener('DOMContentLoaded', () => document.getElementById('theme-toggle').addEventListener('click', toggle));
})();
