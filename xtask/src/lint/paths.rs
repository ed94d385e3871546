//! Finds the paths in Rust code, and resolves them within a crate.

use std::path::{Component, Path};

/// A path as written, from its first name on; `use a::{b, c}` has two paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Used {
    /// Line number from 1; for an import, the line of `use`.
    pub line: usize,
    pub names: Vec<String>,
    /// Whether the path is in a `use`.
    pub is_import: bool,
    /// Whether the path is in a `pub use`, in any form.
    pub is_reexport: bool,
    /// The name after `as`.
    pub alias: Option<String>,
}

impl Used {
    /// Returns the path from the root of the crate; `None` if the path starts with another name, which may be a crate's.
    pub fn absolute(&self, module: &[String], own_crate: &str) -> Option<Vec<String>> {
        let mut names = self.names.iter().peekable();
        let mut base = match names.next()?.as_str() {
            "crate" => Vec::new(),
            name if name == own_crate => Vec::new(),
            "self" => module.to_vec(),
            "super" => module.split_last().map(|(_, above)| above.to_vec()).unwrap_or_default(),
            _ => return None,
        };
        while names.next_if(|name| *name == "super").is_some() {
            base.pop();
        }
        base.extend(names.cloned());
        Some(base)
    }

    /// Returns the name that the item has in a module that re-exports it: the alias, or the last name of the path.
    pub fn name(&self) -> &str {
        self.alias.as_ref().or(self.names.last()).map_or("", |name| name)
    }
}

/// Returns the module path of a file in a crate's `src`; `lib.rs` is the root, and `main.rs` a module `main`.
pub(super) fn module(inside_src: &Path) -> Vec<String> {
    let without = inside_src.with_extension("");
    let names = without.components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str().map(str::to_owned),
        _ => None,
    });
    let mut names: Vec<_> = names.collect();
    names.pop_if(|name| name == "mod");
    names.pop_if(|name| name == "lib");
    names
}

/// Returns every path in the code.
pub(super) fn paths(code: &str) -> Vec<Used> {
    let tokens = tokens(code);
    let mut reader = Reader { tokens: &tokens, at: 0, found: Vec::new() };
    while reader.at < tokens.len() {
        reader.step();
    }
    reader.found
}

struct Reader<'a> {
    tokens: &'a [(usize, &'a str)],
    at: usize,
    found: Vec<Used>,
}

impl Reader<'_> {
    fn word(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.1)
    }

    fn step(&mut self) {
        if self.word(self.at) == "use" {
            let before = self.at.checked_sub(1).map_or("", |before| self.word(before));
            // In `pub(super) use`, the token before `use` is a parenthesis; no other import follows a parenthesis.
            let is_reexport = matches!(before, "pub" | ")");
            // `impl Trait + use<'a>` is not an import.
            if self.word(self.at + 1) != "<" {
                let line = self.tokens[self.at].0;
                self.at += 1;
                self.tree(&mut Vec::new(), line, is_reexport);
                return;
            }
        }
        let starts_path = is_name(self.word(self.at)) && (self.at == 0 || self.word(self.at - 1) != "::");
        if !starts_path || self.word(self.at + 1) != "::" {
            self.at += 1;
            return;
        }
        let line = self.tokens[self.at].0;
        let mut names = vec![self.word(self.at).to_owned()];
        self.at += 1;
        while self.word(self.at) == "::" && is_name(self.word(self.at + 1)) {
            names.push(self.word(self.at + 1).to_owned());
            self.at += 2;
        }
        self.found.push(Used { line, names, is_import: false, is_reexport: false, alias: None });
    }

    /// Reads a tree of imports (`a::b`, `a::{b, c as d}`, `a::*`) below the names `above`.
    fn tree(&mut self, above: &mut Vec<String>, line: usize, is_reexport: bool) {
        let depth = above.len();
        if self.word(self.at) == "::" {
            self.at += 1;
        }
        while is_name(self.word(self.at)) || self.word(self.at) == "*" {
            above.push(self.word(self.at).to_owned());
            self.at += 1;
            if self.word(self.at) != "::" {
                break;
            }
            self.at += 1;
        }
        if self.word(self.at) == "{" {
            self.at += 1;
            while !matches!(self.word(self.at), "}" | "") {
                self.tree(above, line, is_reexport);
                if self.word(self.at) == "," {
                    self.at += 1;
                }
            }
            self.at += 1;
        } else {
            let mut names = above.clone();
            names.pop_if(|name| name == "self" && depth > 0);
            let alias = (self.word(self.at) == "as").then(|| {
                self.at += 2;
                self.word(self.at - 1).to_owned()
            });
            if names.is_empty() {
                // Skips a token that no import can have here.
                self.at += 1;
            } else {
                self.found.push(Used { line, names, is_import: true, is_reexport, alias });
            }
        }
        above.truncate(depth);
    }
}

fn is_name(word: &str) -> bool {
    word != "as" && word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Returns words, `::` and single characters, each with its line number from 1.
fn tokens(code: &str) -> Vec<(usize, &str)> {
    let mut tokens = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
            let length = match word {
                0 if rest.starts_with("::") => 2,
                0 => first.len_utf8(),
                word => word,
            };
            if !first.is_whitespace() {
                tokens.push((number + 1, &rest[..length]));
            }
            rest = &rest[length..];
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(code: &str) -> Vec<String> {
        paths(code).into_iter().map(|used| used.names.join("::")).collect()
    }

    #[test]
    fn groups_are_taken_apart_and_expressions_count() {
        let code =
            "use a::{b::{self, C}, d as e};\nfn f() -> impl X + use<> { crate::g::h::<T>(i::J); k.l() }";
        assert_eq!(found(code), ["a::b", "a::b::C", "a::d", "crate::g::h", "i::J"]);
        assert_eq!(paths(code)[2].name(), "e");
        assert_eq!(paths(code)[3].line, 2);
    }

    #[test]
    fn a_path_is_followed_from_where_it_stands() {
        let module = module(Path::new("sync/driver.rs"));
        let absolute =
            |code: &str| paths(code)[0].absolute(&module, "proxy_user").map(|path| path.join("::"));
        assert_eq!(absolute("use super::job::Job;").unwrap(), "sync::job::Job");
        assert_eq!(absolute("use super::super::plan::Plan;").unwrap(), "plan::Plan");
        assert_eq!(absolute("use self::early::Early;").unwrap(), "sync::driver::early::Early");
        assert_eq!(absolute("fn f() { proxy_user::cli::run() }").unwrap(), "cli::run");
        assert_eq!(absolute("use std::io;"), None);
    }

    #[test]
    fn every_form_of_handing_on_is_known() {
        for code in ["pub use a::B;", "pub(crate) use a::B;", "pub(super) use a::B;"] {
            assert!(paths(code)[0].is_reexport, "{code}");
        }
        assert!(!paths("fn f() {}\nuse a::B;")[0].is_reexport);
    }

    #[test]
    fn files_are_modules() {
        let of = |path: &str| module(Path::new(path)).join("::");
        assert_eq!(
            ["lib.rs", "main.rs", "a.rs", "a/mod.rs", "a/b.rs"].map(of),
            ["", "main", "a", "a", "a::b"]
        );
    }
}
