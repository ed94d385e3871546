//! The project's text files, and Rust code without comments and literals.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// A text file of the project.
#[derive(Clone, Debug)]
pub(super) struct SourceFile {
    /// Path from the project's root.
    pub path: PathBuf,
    pub text: String,
}

impl SourceFile {
    /// Whether the file is Rust code.
    pub fn is_rust(&self) -> bool {
        self.path.extension().is_some_and(|ext| ext == "rs")
    }

    /// Whether the file contains only tests: `x/tests.rs`, `x/tests/y.rs`, and the `tests` folder of a crate.
    pub fn is_test(&self) -> bool {
        self.path.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs")
    }

    /// Returns the names of the file's `#[cfg(test)]` modules that are separate files.
    pub fn test_modules(&self) -> Vec<String> {
        let code = blank(&self.text);
        let after = code.split("#[cfg(test)]").skip(1).filter_map(|rest| {
            let (declared, _) = rest.split_once(';')?;
            let (_, name) = declared.trim().split_once("mod ")?;
            Some(name.trim().to_owned())
        });
        after.filter(|name| name.chars().all(|c| c.is_alphanumeric() || c == '_')).collect()
    }

    /// Returns the code line by line, without comments, literals and the `#[cfg(test)]` module at its end.
    pub fn code(&self) -> Vec<String> {
        let code = blank(&self.text);
        let end = code
            .find("#[cfg(test)]\nmod ")
            .filter(|&start| code[start..].contains('{'))
            .unwrap_or(code.len());
        code[..end].lines().map(str::to_owned).collect()
    }
}

/// Returns all text files below the root, without cargo's and git's folders (`target`, `.git`).
pub(super) fn files(root: &Path) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let path = entry.context("cannot list a folder")?.path();
            let is_kept_out = ["target", ".git"].iter().any(|name| path.ends_with(name));
            if is_kept_out || path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                let path = path.strip_prefix(root).unwrap_or(&path).to_owned();
                files.push(SourceFile { path, text });
            }
        }
    }
    Ok(files)
}

/// Returns the text with spaces instead of comments and literals; line breaks stay.
fn blank(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = match chars[at] {
            '/' if chars.get(at + 1) == Some(&'/') => find(&chars, at, |c| c[0] == '\n'),
            '/' if chars.get(at + 1) == Some(&'*') => end_of_comment(&chars, at),
            '"' => end_of_string(&chars, at),
            'r' if !is_word(at.checked_sub(1).map(|before| chars[before])) => end_of_raw(&chars, at),
            '\'' => end_of_char(&chars, at),
            _ => at,
        };
        if end == at {
            out.push(chars[at]);
            at += 1;
        }
        while at < end.min(chars.len()) {
            out.push(if chars[at] == '\n' { '\n' } else { ' ' });
            at += 1;
        }
    }
    out
}

fn is_word(c: Option<char>) -> bool {
    c.is_some_and(|c| c.is_alphanumeric() || c == '_')
}

fn find(chars: &[char], from: usize, is_end: impl Fn(&[char]) -> bool) -> usize {
    (from..chars.len()).find(|&at| is_end(&chars[at..])).unwrap_or(chars.len())
}

fn end_of_comment(chars: &[char], from: usize) -> usize {
    let (mut depth, mut at) = (0, from);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn end_of_string(chars: &[char], from: usize) -> usize {
    let mut at = from + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Returns the end of `r"..."` or `r#"..."#`, or `from` itself if no such literal begins there.
fn end_of_raw(chars: &[char], from: usize) -> usize {
    let hashes = chars[from + 1..].iter().take_while(|&&c| c == '#').count();
    let open = from + 1 + hashes;
    if chars.get(open) != Some(&'"') {
        return from;
    }
    let is_end = |c: &[char]| c[0] == '"' && c[1..].iter().take_while(|&&c| c == '#').count() >= hashes;
    find(chars, open + 1, is_end) + 1 + hashes
}

/// Returns the end of a character literal, or `from` itself if a lifetime begins there.
fn end_of_char(chars: &[char], from: usize) -> usize {
    match (chars.get(from + 1), chars.get(from + 2)) {
        (Some('\\'), Some(_)) => find(chars, from + 3, |c| c[0] == '\'') + 1,
        (Some(_), Some('\'')) => from + 3,
        _ => from,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        let text = "a // crate::x\nb /* crate::y /* z */ */ c \"crate::\\\"w\" d r#\"crate::v\"# e '\"' f 'q' <'life> g";
        let code = file("x.rs", text).code().join("\n");
        assert!(!code.contains("crate"), "{code}");
        assert_eq!(
            code.split_whitespace().collect::<Vec<_>>(),
            ["a", "b", "c", "d", "e", "f", "<'life>", "g"]
        );
    }

    #[test]
    fn lines_stay_where_they_are() {
        let code = file("x.rs", "/* one\ntwo */ three\nfour").code();
        assert_eq!(code.iter().map(|line| line.trim()).collect::<Vec<_>>(), ["", "three", "four"]);
    }

    #[test]
    fn the_test_module_at_the_end_is_left_out() {
        let code = file("x.rs", "fn a() {}\n#[cfg(test)]\nmod tests {\n use crate::all;\n}\n").code();
        assert_eq!(code, ["fn a() {}"]);
    }

    #[test]
    fn tests_are_known_by_their_path() {
        assert!(file("a/src/b/tests.rs", "").is_test());
        assert!(file("a/tests/netns/main.rs", "").is_test());
        assert!(!file("a/src/testing.rs", "").is_test());
    }
}
