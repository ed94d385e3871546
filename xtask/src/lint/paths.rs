//! Finds the paths in Rust code, and resolves them within a crate.

use std::path::{Component, Path};

use anyhow::{Context as _, Result};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{ItemMod, ItemUse, Macro, Meta, MetaList, UseTree, Visibility};

use super::source::SourceFile;

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

/// A file of Rust code in a crate's `src`, without files of tests.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    pub path: &'a Path,
    /// Folder of the crate.
    pub package: &'a str,
    pub module: Vec<String>,
    pub code: Code,
}

impl<'a> Unit<'a> {
    /// Reads a file; `None` if it is not Rust code of a crate, or only of tests.
    pub fn read(file: &'a SourceFile) -> Result<Option<Self>> {
        let package = file.path.iter().next().and_then(|name| name.to_str()).unwrap_or_default();
        let Ok(inside) = file.path.strip_prefix(Path::new(package).join("src")) else { return Ok(None) };
        if !file.is_rust() || file.is_test() {
            return Ok(None);
        }
        let code = Code::read(&file.text).with_context(|| format!("cannot parse {}", file.path.display()))?;
        Ok(Some(Self { path: &file.path, package, module: module(inside), code }))
    }
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

/// What a file of Rust code uses outside its `#[cfg(test)]` modules.
#[derive(Debug, Default)]
pub(super) struct Code {
    /// Every path with more than one name, and every import.
    pub used: Vec<Used>,
    /// Names of the `#[cfg(test)]` modules that are separate files.
    pub test_modules: Vec<String>,
}

impl Code {
    /// Reads the text of a file.
    pub fn read(text: &str) -> syn::Result<Self> {
        let mut code = Self::default();
        code.visit_file(&syn::parse_file(text)?);
        Ok(code)
    }

    fn add(&mut self, line: usize, names: Vec<String>) {
        if names.len() > 1 {
            self.used.push(Used { line, names, is_import: false, is_reexport: false, alias: None });
        }
    }

    /// Reads a tree of imports (`a::b`, `a::{b, c as d}`, `a::*`) below the names `above`.
    fn import(&mut self, tree: &UseTree, above: &[String], line: usize, is_reexport: bool) {
        let below = |name: &dyn ToString| [above, &[name.to_string()]].concat();
        let (names, alias) = match tree {
            UseTree::Path(path) => return self.import(&path.tree, &below(&path.ident), line, is_reexport),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.import(tree, above, line, is_reexport));
            }
            UseTree::Name(name) if name.ident == "self" && !above.is_empty() => (above.to_vec(), None),
            UseTree::Name(name) => (below(&name.ident), None),
            UseTree::Rename(as_name) => (below(&as_name.ident), Some(as_name.rename.to_string())),
            UseTree::Glob(_) => (below(&"*"), None),
        };
        self.used.push(Used { line, names, is_import: true, is_reexport, alias });
    }

    /// Reads the paths in the arguments of a macro or of an attribute.
    fn tokens(&mut self, stream: TokenStream) {
        let trees: Vec<_> = stream.into_iter().collect();
        let mut rest = &trees[..];
        while let [first, after @ ..] = rest {
            rest = after;
            match first {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(name) => {
                    let mut names = vec![name.to_string()];
                    while let [TokenTree::Punct(a), TokenTree::Punct(b), TokenTree::Ident(next), after @ ..] =
                        rest
                        && (a.as_char(), b.as_char()) == (':', ':')
                    {
                        names.push(next.to_string());
                        rest = after;
                    }
                    self.add(name.span().start().line, names);
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Code {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_reexport = !matches!(item.vis, Visibility::Inherited);
        self.import(&item.tree, &[], item.use_token.span.start().line, is_reexport);
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let is_test = |meta: &Meta| matches!(meta, Meta::List(list) if list.path.is_ident("cfg") && list.tokens.to_string() == "test");
        if !item.attrs.iter().any(|attribute| is_test(&attribute.meta)) {
            visit::visit_item_mod(self, item);
        } else if item.content.is_none() {
            self.test_modules.push(item.ident.to_string());
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if let (None, Some(first)) = (&path.leading_colon, path.segments.first()) {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.add(first.ident.span().start().line, names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        visit::visit_macro(self, call);
        self.tokens(call.tokens.clone());
    }

    fn visit_meta_list(&mut self, list: &'ast MetaList) {
        self.tokens(list.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(code: &str) -> Vec<Used> {
        Code::read(code).unwrap().used
    }

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
    fn paths_are_found_in_arguments_of_macros_and_attributes() {
        let code = "#[a(b = c::d)]\nfn f() { g!(h, crate::i::J { k: l::m() }) }\n/* n::o */ const P: &str = \"q::r\"; // s::t\n";
        assert_eq!(found(code), ["c::d", "crate::i::J", "l::m"]);
    }

    #[test]
    fn test_modules_do_not_count() {
        let code = "use a::b;\n#[cfg(test)]\nmod c;\n#[cfg(test)]\nmod tests {\n use crate::all;\n}\nmod d { use super::e; }";
        assert_eq!(found(code), ["a::b", "super::e"]);
        assert_eq!(Code::read(code).unwrap().test_modules, ["c"]);
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
