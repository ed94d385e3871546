//! Finds the paths in Rust code, and resolves them within a crate.

use std::path::{Component, Path};

use anyhow::{Context as _, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::source::SourceFile;

/// A path as written, from its first name on; `use a::{b, c}` has two paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Used {
    /// Line number from 1.
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

/// A file of Rust code in a crate's `src`, without files of tests.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    pub path: &'a Path,
    /// Folder of the crate.
    pub package: &'a str,
    pub module: Vec<String>,
    /// Every path with more than one name, and every import, outside of `#[cfg(test)]` modules.
    pub used: Vec<Used>,
    /// Names of the `#[cfg(test)]` modules that are separate files.
    pub test_modules: Vec<String>,
}

impl<'a> Unit<'a> {
    /// Reads a file; `None` if it is not Rust code of a crate, or only of tests.
    pub fn read(file: &'a SourceFile) -> Result<Option<Self>> {
        let package = file.path.iter().next().and_then(|name| name.to_str()).unwrap_or_default();
        let Ok(inside) = file.path.strip_prefix(Path::new(package).join("src")) else { return Ok(None) };
        if !file.is_rust() || file.is_test() {
            return Ok(None);
        }
        let tokens: TokenStream = file
            .text
            .parse()
            .map_err(|error| anyhow!("{error}"))
            .with_context(|| format!("cannot parse {}", file.path.display()))?;
        let mut unit = Self {
            path: &file.path,
            package,
            module: module(inside),
            used: Vec::new(),
            test_modules: Vec::new(),
        };
        unit.code(tokens);
        Ok(Some(unit))
    }

    /// Reads code, and the arguments of its macros and attributes.
    fn code(&mut self, stream: TokenStream) {
        let trees: Vec<_> = stream.into_iter().collect();
        let mut rest = &trees[..];
        let mut is_public = false;
        while let [first, after @ ..] = rest {
            rest = after;
            let was_public = std::mem::take(&mut is_public);
            match first {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis && was_public => {
                    // `pub(crate)`
                    is_public = true;
                }
                TokenTree::Group(group) if group.stream().to_string() == "cfg (test)" => {
                    if let [TokenTree::Ident(word), TokenTree::Ident(name), body, after @ ..] = rest
                        && word == "mod"
                    {
                        if !matches!(body, TokenTree::Group(_)) {
                            self.test_modules.push(name.to_string());
                        }
                        rest = after;
                    }
                }
                TokenTree::Group(group) => self.code(group.stream()),
                TokenTree::Ident(word) if word == "pub" => is_public = true,
                // Not `use<'a>` in a type.
                TokenTree::Ident(word) if word == "use" && !is_punct(rest.first(), '<') => {
                    let end = rest.iter().position(|tree| is_punct(Some(tree), ';')).unwrap_or(rest.len());
                    self.imports(&rest[..end], &[], was_public);
                    rest = &rest[end..];
                }
                TokenTree::Ident(name) => {
                    let names = names(first, &mut rest);
                    if names.len() > 1 {
                        let line = name.span().start().line;
                        self.used.push(Used {
                            line,
                            names,
                            is_import: false,
                            is_reexport: false,
                            alias: None,
                        });
                    }
                }
                _ => {}
            }
        }
    }

    /// Reads trees of imports (`a::b`, `a::{b, c as d}`, `a::*`) below the names `above`.
    fn imports(&mut self, trees: &[TokenTree], above: &[String], is_reexport: bool) {
        for mut rest in trees.split(|tree| is_punct(Some(tree), ',')) {
            let [first, after @ ..] = rest else { continue };
            rest = after;
            let mut names = [above, &names(first, &mut rest)].concat();
            names.pop_if(|name| name == "self" && !above.is_empty());
            let alias = match rest {
                [TokenTree::Ident(_), name] => Some(name.to_string()),
                [.., TokenTree::Group(group)] => {
                    let inside: Vec<_> = group.stream().into_iter().collect();
                    self.imports(&inside, &names, is_reexport);
                    continue;
                }
                // `*`
                [.., _] => {
                    names.push("*".to_owned());
                    None
                }
                [] => None,
            };
            let line = first.span().start().line;
            self.used.push(Used { line, names, is_import: true, is_reexport, alias });
        }
    }
}

/// Returns the names of the path that begins with `first`, and removes them from the tokens after it.
fn names(first: &TokenTree, rest: &mut &[TokenTree]) -> Vec<String> {
    let mut names = vec![first.to_string()];
    while let [a, b, TokenTree::Ident(next), after @ ..] = *rest
        && is_punct(Some(a), ':')
        && is_punct(Some(b), ':')
    {
        names.push(next.to_string());
        *rest = after;
    }
    names
}

fn is_punct(tree: Option<&TokenTree>, character: char) -> bool {
    matches!(tree, Some(TokenTree::Punct(punct)) if punct.as_char() == character)
}

/// Returns the module path of a file in a crate's `src`; `lib.rs` is the root, and `main.rs` a module `main`.
fn module(inside_src: &Path) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn with_unit<T>(path: &str, code: &str, look: impl FnOnce(&Unit<'_>) -> T) -> T {
        let file = SourceFile { path: Path::new("a/src").join(path), text: code.to_owned() };
        look(&Unit::read(&file).unwrap().unwrap())
    }

    fn found(code: &str) -> Vec<String> {
        with_unit("x.rs", code, |unit| unit.used.iter().map(|used| used.names.join("::")).collect())
    }

    #[test]
    fn paths_are_found_in_groups_expressions_macros_and_attributes_and_not_in_tests() {
        let code =
            "use a::{b::{self, C}, d as e, *};\nfn f() -> impl X + use<> { crate::g::h::<T>(i::J); k.l() }";
        assert_eq!(found(code), ["a::b", "a::b::C", "a::d", "a::*", "crate::g::h", "i::J"]);
        with_unit("x.rs", code, |unit| {
            assert_eq!((unit.used[2].name(), unit.used[4].line), ("e", 2));
        });
        let code = "#[a(b = c::d)]\nfn f() { g!(h, crate::i::J { k: l::m() }) }\n/* n::o */ const P: &str = \"q::r\"; // s::t\n";
        assert_eq!(found(code), ["c::d", "crate::i::J", "l::m"]);
        let code = "use a::b;\n#[cfg(test)]\nmod c;\n#[cfg(test)]\nmod tests {\n use crate::all;\n}\nmod d { use super::e; }";
        assert_eq!(found(code), ["a::b", "super::e"]);
        with_unit("x.rs", code, |unit| assert_eq!(unit.test_modules, ["c"]));
    }

    #[test]
    fn a_path_is_followed_from_where_it_stands() {
        let absolute = |code: &str| {
            with_unit("sync/driver.rs", code, |unit| {
                unit.used[0].absolute(&unit.module, "proxy_user").map(|path| path.join("::"))
            })
        };
        assert_eq!(absolute("use super::job::Job;").unwrap(), "sync::job::Job");
        assert_eq!(absolute("use super::super::plan::Plan;").unwrap(), "plan::Plan");
        assert_eq!(absolute("use self::early::Early;").unwrap(), "sync::driver::early::Early");
        assert_eq!(absolute("fn f() { proxy_user::cli::run() }").unwrap(), "cli::run");
        assert_eq!(absolute("use std::io;"), None);
    }

    #[test]
    fn every_form_of_handing_on_is_known() {
        let is_reexport = |code: &str| with_unit("x.rs", code, |unit| unit.used[0].is_reexport);
        for code in ["pub use a::B;", "pub(crate) use a::B;", "pub(super) use a::B;"] {
            assert!(is_reexport(code), "{code}");
        }
        assert!(!is_reexport("pub fn f() {}\nuse a::B;"));
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
