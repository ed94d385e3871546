//! Finds long Rust files: a file of more than four screens contains more than one idea.

use super::finding::Finding;
use super::source::SourceFile;

/// Maximum number of lines. Tests may be longer: a table of cases is one idea.
const LIMIT: usize = 400;

pub(super) fn check(file: &SourceFile) -> Option<Finding> {
    let lines = file.text.lines().count();
    let is_long = file.is_rust() && !file.is_test() && lines > LIMIT;
    is_long.then(|| Finding {
        file: file.path.clone(),
        line: 0,
        what: format!("{lines} lines, more than {LIMIT}: split it"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, lines: usize) -> bool {
        check(&SourceFile { path: path.into(), text: "\n".repeat(lines) }).is_some()
    }

    #[test]
    fn long_code_is_found_long_tests_and_documents_are_not() {
        assert!(found("a/src/b.rs", LIMIT + 1));
        assert!(!found("a/src/b.rs", LIMIT));
        assert!(!found("a/src/b/tests.rs", LIMIT + 1));
        assert!(!found("docs/a.md", LIMIT + 1));
    }
}
