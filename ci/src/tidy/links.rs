//! Links between the documents lead somewhere.

use super::Problem;
use super::tree::Tree;

/// Links to files or headings that do not exist. Addresses of other machines are not asked for: a
/// check must not depend on them.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.texts("md") {
        for (line, target) in targets(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, heading) = match target.split_once('#') {
                Some((file, heading)) => (file, Some(heading)),
                None => (target.as_str(), None),
            };
            let file = if file.is_empty() { Some(path.to_owned()) } else { resolve(path, file) };
            let Some(file) = file.filter(|file| tree.has(file)) else {
                problems.push(Problem::new(path, line, format!("link to nowhere: {target}")));
                continue;
            };
            if path.starts_with("docs/") && !file.starts_with("docs/") {
                let text = format!("a page of the book links to a file outside of it: {target}");
                problems.push(Problem::new(path, line, text));
            }
            let known = |heading: &str| tree.text(&file).is_some_and(|t| has_heading(t, heading));
            if heading.is_some_and(|heading| !known(heading)) {
                problems.push(Problem::new(path, line, format!("no such heading: {target}")));
            }
        }
    }
    problems
}

/// The target of every inline link and every link definition, with its line from 1.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        let line = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
        for (at, _) in line.match_indices("](") {
            let end = line[at..].find(')').map_or(line.len(), |length| at + length);
            found.push((index + 1, line[at + 2..end].to_owned()));
        }
        if let Some((_, target)) = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")) {
            found.push((index + 1, target.trim().to_owned()));
        }
    }
    found
}

/// The file that a link of this document means, relative to the root; `None` when outside of it.
fn resolve(document: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in link.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Whether a heading of the text is reached by this anchor, as the usual viewers build anchors.
pub(crate) fn has_heading(text: &str, anchor: &str) -> bool {
    let mut fenced = false;
    text.lines().any(|line| {
        fenced ^= line.trim_start().starts_with("```");
        !fenced && line.starts_with('#') && slug(line.trim_start_matches('#').trim()) == anchor
    })
}

fn slug(heading: &str) -> String {
    let kept = heading.chars().filter(|&c| c.is_alphanumeric() || c == ' ' || c == '-' || c == '_');
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tree::testing::tree;
    use super::*;

    fn problems(link: &str) -> usize {
        let text = format!("see [it]({link})");
        let style = "# Style\n\n## One rule, two words\n";
        let files = [("docs/A.md", text.as_str()), ("docs/STYLE.md", style), ("ci/src/x.rs", "")];
        check(&tree(&files)).len()
    }

    #[test]
    fn links_that_lead_somewhere_are_fine() {
        for link in ["STYLE.md", "./STYLE.md", "../docs/STYLE.md", "https://example.org/x"] {
            assert_eq!(problems(link), 0, "{link}");
        }
    }

    #[test]
    fn links_to_nowhere_are_found() {
        for link in ["GONE.md", "../STYLE.md", "../../outside.md", "../ci/src/x.rs", "../ci/"] {
            assert_eq!(problems(link), 1, "{link}");
        }
    }

    #[test]
    fn headings_are_looked_for() {
        assert_eq!(problems("STYLE.md#one-rule-two-words"), 0);
        assert_eq!(problems("STYLE.md#no-such"), 1);
        assert_eq!(problems("#no-such"), 1);
    }

    #[test]
    fn definitions_count_and_code_does_not() {
        let text = "[a]: GONE.md\n\n`[b](GONE.md)`\n```\n[c](GONE.md)\n```\n";
        assert_eq!(check(&tree(&[("docs/A.md", text)])).len(), 1);
    }
}
