//! Finds circular dependencies between the files of a crate, and re-exports from another layer.
//!
//! A file depends on another file if it names an item of that file, in a `use` or in an expression. If a path goes through an
//! import in a third file, the dependency is on the file that has the item. `super::` is a path like any other: a child
//! module that names its parent's items depends on the parent's file. Two things are no dependency, since they only say where
//! an item is: a parent's `mod`, and a parent's `pub use` of its children's items. So a `mod.rs` with only such lines is in
//! no circle, while a `mod.rs` with code of its own may use its children or be used by them, not both.
//!
//! A `pub use` of an item of another top-level module, or of another of our crates, would give the item a second path; a
//! module that needs the item uses its first path.

use std::collections::{BTreeMap, BTreeSet};
use std::slice::from_ref;

use super::paths::{Unit, Used};
use super::source::Finding;

/// Returns a finding for each circle of files within a crate, and for each re-export of another layer's item.
pub(super) fn check(units: &[Unit<'_>]) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, Vec<&Unit<'_>>> = BTreeMap::new();
    for unit in units {
        crates.entry(unit.package).or_default().push(unit);
    }
    let names: Vec<_> = crates.keys().map(|name| name.replace('-', "_")).collect();
    let mut findings = Vec::new();
    for (name, mut units) in crates {
        let tests: Vec<_> = units.iter().flat_map(|unit| unit.test_modules()).collect();
        units.retain(|unit| !tests.iter().any(|test| unit.module.starts_with(test)));
        let own_crate = name.replace('-', "_");
        for unit in &units {
            findings.extend(unit.foreign_reexports(&own_crate, &names));
        }
        findings.extend(circles(&units, &own_crate));
    }
    findings
}

impl Unit<'_> {
    fn test_modules(&self) -> impl Iterator<Item = Vec<String>> {
        self.test_modules.iter().map(|name| [&self.module[..], from_ref(name)].concat())
    }

    fn foreign_reexports(&self, own_crate: &str, our_crates: &[String]) -> Vec<Finding> {
        let is_foreign = |used: &Used| match used.absolute(&self.module, own_crate) {
            Some(path) => self.module.first().is_some_and(|top| path.first() != Some(top)),
            None => our_crates.contains(&used.names[0]),
        };
        let used = self.used.iter().filter(|used| used.is_reexport && is_foreign(used));
        let what = |used: &Used| {
            format!("`pub use` of another layer: name {} where it is used", used.names.join("::"))
        };
        used.map(|used| Finding { file: self.path.to_owned(), line: used.line, what: what(used) }).collect()
    }
}

/// A crate's files, by module.
struct Map<'a> {
    units: &'a [&'a Unit<'a>],
    by_module: BTreeMap<&'a [String], usize>,
    own_crate: &'a str,
}

impl Map<'_> {
    /// Returns the file that has the item of a path, after following at most `hops` imports and re-exports.
    fn find(&self, path: &[String], hops: u32) -> Option<usize> {
        let depth = (0..=path.len()).rev().find(|depth| self.by_module.contains_key(&path[..*depth]))?;
        let at = self.by_module[&path[..depth]];
        let Some(name) = path.get(depth).filter(|_| hops > 0) else { return Some(at) };
        let foreign_reexports = |used: &&Used| used.is_import && used.name() == name;
        let Some(used) = self.units[at].used.iter().find(foreign_reexports) else { return Some(at) };
        let Some(mut next) = self.absolute(at, used) else { return Some(at) };
        next.extend_from_slice(&path[depth + 1..]);
        self.find(&next, hops - 1)
    }

    /// Returns the path from the crate's root. The first name may be that of a child module.
    fn absolute(&self, at: usize, used: &Used) -> Option<Vec<String>> {
        let module = &self.units[at].module;
        used.absolute(module, self.own_crate).or_else(|| {
            let path = [&module[..], &used.names[..]].concat();
            self.by_module.contains_key(&path[..=module.len()]).then_some(path)
        })
    }

    /// Returns the files on which file `at` depends, each with the line and the name of one use.
    fn dependencies(&self, at: usize) -> BTreeMap<usize, (usize, String)> {
        let unit = self.units[at];
        let mut found = BTreeMap::new();
        for used in &unit.used {
            let Some(path) = self.absolute(at, used) else { continue };
            let is_child = path.len() > unit.module.len() && path.starts_with(&unit.module);
            if used.is_reexport && is_child {
                continue;
            }
            // No path goes through more than a few re-exports; the compiler rejects re-exports in a circle.
            if let Some(to) = self.find(&path, 8).filter(|to| *to != at) {
                found.entry(to).or_insert_with(|| (used.line, used.name().to_owned()));
            }
        }
        found
    }
}

/// Returns one finding for each circle, at its first file, with the uses between its files.
fn circles(units: &[&Unit<'_>], own_crate: &str) -> Vec<Finding> {
    let by_module = units.iter().enumerate().map(|(at, unit)| (&unit.module[..], at)).collect();
    let map = Map { units, by_module, own_crate };
    let edges: Vec<_> = (0..units.len()).map(|at| map.dependencies(at)).collect();
    let reach: Vec<BTreeSet<usize>> = (0..units.len()).map(|from| reachable(&edges, from)).collect();
    let mut reported = BTreeSet::new();
    let mut findings = Vec::new();
    for from in 0..units.len() {
        if !reach[from].contains(&from) || !reported.insert(from) {
            continue;
        }
        let all: BTreeSet<_> = reach[from].iter().copied().filter(|to| reach[*to].contains(&from)).collect();
        reported.extend(&all);
        let mut ways: Vec<String> = Vec::new();
        for at in &all {
            for (to, (line, name)) in edges[*at].iter().filter(|(to, _)| all.contains(to)) {
                let (file, to) = (units[*at].path.display(), units[*to].path.display());
                ways.push(format!("    {file}:{line} uses {name} of {to}"));
            }
        }
        let what = format!("{} files use each other in a circle:\n{}", all.len(), ways.join("\n"));
        findings.push(Finding { file: units[from].path.to_owned(), line: 0, what });
    }
    findings
}

fn reachable(edges: &[BTreeMap<usize, (usize, String)>], from: usize) -> BTreeSet<usize> {
    let mut seen = BTreeSet::new();
    let mut open = vec![from];
    while let Some(at) = open.pop() {
        open.extend(edges[at].keys().filter(|to| seen.insert(**to)));
    }
    seen
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::lint::source::SourceFile;

    fn found_in(files: &[(&str, &str)]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| SourceFile {
            path: Path::new("one/src").join(path),
            text: (*text).to_owned(),
        };
        let files: Vec<_> = files.iter().map(file).collect();
        let units: Vec<_> = files.iter().filter_map(|file| Unit::read(file).unwrap()).collect();
        check(&units).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn files_that_use_each_other_are_found_once() {
        let circle =
            [("a.rs", "use crate::b::B;"), ("b.rs", "use crate::c;"), ("c.rs", "fn f() { super::a::g() }")];
        let found = found_in(&circle);
        assert_eq!(found.len(), 1, "{found:?}");
        for part in ["3 files", "one/src/a.rs:1 uses B of one/src/b.rs", "c.rs:1 uses g of one/src/a.rs"] {
            assert!(found[0].contains(part), "{part}: {found:?}");
        }
        assert!(found_in(&circle[..2]).is_empty());
    }

    #[test]
    fn children_re_exports_and_tests_close_a_circle_only_by_an_item_that_is_used() {
        let parent = ("a.rs", "mod b;\nfn f() { b::g() }\npub struct A;");
        let face = ("a/mod.rs", "mod b;\nmod c;\npub use b::B;");
        let tests =
            "use crate::b::B;\n#[cfg(test)]\nmod helpers;\n#[cfg(test)]\nmod tests {\n use crate::c::C;\n}\n";
        for (files, circles) in [
            (&[parent, ("a/b.rs", "use super::A;")][..], 1),
            (&[parent, ("a/b.rs", "pub fn g() {}")], 0),
            (&[("a.rs", "mod b;\npub use b::B;\npub struct A;"), ("a/b.rs", "use super::A;")], 0),
            (&[face, ("a/b.rs", ""), ("a/c.rs", "use super::B;")], 0),
            (&[face, ("a/b.rs", "use super::c::C;"), ("a/c.rs", "use crate::a::B;")], 1),
            (
                &[
                    ("a.rs", tests),
                    ("b.rs", "// crate::a::A\n"),
                    ("c.rs", "use crate::a::A;"),
                    ("a/helpers.rs", "use super::A;"),
                ],
                0,
            ),
        ] {
            assert_eq!(found_in(files).len(), circles, "{files:?}");
        }
    }

    #[test]
    fn nothing_is_handed_on_from_another_layer() {
        let found =
            found_in(&[("a.rs", "pub use crate::b::B;"), ("b.rs", ""), ("lib.rs", "mod a;\npub use a::B;")]);
        assert_eq!(found, ["`pub use` of another layer: name crate::b::B where it is used"]);
    }
}
