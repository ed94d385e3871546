//! Checks links between the project's documents: each file and heading that a link names has to exist. Uses no network.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::source::{Finding, SourceFile};

/// The list of pages of the book.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Checks all documents; `exists` returns whether a path from the root is a file.
pub(super) fn check(files: &[SourceFile], exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let is_page = |file: &&SourceFile| file.path.extension().is_some_and(|ext| ext == "md");
    let pages: Vec<_> = files.iter().filter(is_page).map(|file| (file, Page::read(&file.text))).collect();
    let anchors: BTreeMap<_, _> = pages.iter().map(|(file, page)| (&*file.path, &page.anchors)).collect();
    let mut findings = Vec::new();
    let mut listed = BTreeSet::new();
    for (file, page) in &pages {
        let mut find = |line, what| findings.push(Finding { file: file.path.clone(), line, what });
        for Link { line, to } in &page.links {
            let (path, anchor) = to.split_once('#').unwrap_or((to, ""));
            let Some(path) = resolve(&file.path, path) else {
                find(*line, format!("`{to}` leads out of the project"));
                continue;
            };
            let known = anchors.get(&*path);
            if file.path == Path::new(SUMMARY) {
                listed.insert(path.clone());
            }
            match known {
                _ if !exists(&path) => find(*line, format!("`{to}`: no file {}", path.display())),
                Some(anchors) if !anchor.is_empty() && !anchors.contains(anchor) => {
                    find(*line, format!("`{to}`: no such heading in {}", path.display()));
                }
                _ => {}
            }
        }
    }
    let is_chapter = |path: &Path| path.starts_with("docs") && path != Path::new(SUMMARY);
    for path in anchors.into_keys().filter(|path| is_chapter(path) && !listed.contains(*path)) {
        let what = format!("is no page of the book: list it in {SUMMARY}");
        findings.push(Finding { file: path.to_owned(), line: 0, what });
    }
    findings
}

/// Returns the files of the project to which a page links, as paths from the root.
pub(crate) fn targets(page: &Path, text: &str) -> BTreeSet<PathBuf> {
    let links = Page::read(text).links;
    let path = |link: &Link| link.to.split('#').next().unwrap_or_default().to_owned();
    links.iter().filter_map(|link| resolve(page, &path(link))).collect()
}

#[derive(Debug, Default)]
struct Page {
    links: Vec<Link>,
    anchors: BTreeSet<String>,
}

/// A link to a file of the project.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    to: String,
}

impl Page {
    fn read(text: &str) -> Self {
        let mut page = Self::default();
        let mut heading: Option<String> = None;
        let mut seen = BTreeMap::new();
        let line = |at: Range<usize>| text[..at.start].matches('\n').count() + 1;
        for (event, at) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let slug = slug(&heading.take().unwrap_or_default());
                    let count = seen.entry(slug.clone()).and_modify(|count| *count += 1).or_insert(0);
                    page.anchors.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
                }
                Event::Text(part) | Event::Code(part) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&part);
                    }
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. })
                    if is_ours(&dest_url) =>
                {
                    page.links.push(Link { line: line(at), to: dest_url.into_string() });
                }
                _ => {}
            }
        }
        page
    }
}

/// Whether a link leads to a file of the project: it has no `scheme:`.
fn is_ours(link: &str) -> bool {
    !link.split(['/', '#']).next().unwrap_or_default().contains(':')
}

/// Returns a heading's anchor, as GitHub and mdBook make it.
fn slug(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

/// Returns the target of a link of `page`, from the project's root: the page itself for an empty link, `None` if the link
/// leads out of the project.
fn resolve(page: &Path, link: &str) -> Option<PathBuf> {
    if link.is_empty() {
        return Some(page.to_owned());
    }
    let mut path = page.parent()?.to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir if path.pop() => {}
            _ => return None,
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(PathBuf, usize, String)> {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), text: text.into() };
        let files = [
            file("docs/a.md", text),
            file("docs/b.md", "# One\n\n## `--two` and three, four\n\n## One\n"),
            file("docs/SUMMARY.md", "* [A](a.md)\n* [B](b.md)\n"),
        ];
        let there = ["docs/a.md", "docs/b.md", "deploy/x.yaml"];
        let findings = check(&files, |path| there.iter().any(|known| Path::new(known) == path));
        findings.into_iter().map(|found| (found.file, found.line, found.what)).collect()
    }

    #[test]
    fn links_that_lead_somewhere_are_fine() {
        let text = "# Top\n[b](b.md), [two](b.md#--two-and-three-four), [again](b.md#one-1), [top](#top),\n\
                    [file](../deploy/x.yaml) [out](https://a.test/#b) ![picture](b.md)\n`[code](no.md)`\n";
        assert_eq!(found(text), []);
    }

    #[test]
    fn files_headings_and_pages_that_are_not_there_are_found_with_their_lines() {
        let all = found("# Top\n\n[x](c.md)\n\n| [y](b.md#two) |\n|---|\n| [z](../../up) |\n");
        let lines: Vec<_> = all.iter().map(|(_, line, _)| *line).collect();
        assert_eq!(lines, [3, 5, 7], "{all:?}");
        for (found, expected) in all.iter().zip(["no file", "no such heading", "out of the project"]) {
            assert!(found.2.contains(expected), "{found:?}");
        }
        let page = SourceFile { path: "docs/lost.md".into(), text: String::new() };
        let found = check(&[page], |_| true);
        assert_eq!(found.len(), 1);
        assert!(found[0].what.contains("SUMMARY"));
    }
}
