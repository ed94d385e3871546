//! The documents of a YAML file.

/// One document, and its position in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document<'a> {
    /// Its number in the file, from 1.
    pub number: usize,
    /// The line of the file on which it starts, from 1.
    pub line: u64,
    /// Its text.
    pub text: &'a str,
}

impl Document<'_> {
    /// Returns the line of the file on which its content begins.
    pub fn begins(&self) -> u64 {
        (self.line..)
            .zip(self.text.lines())
            .find(|(_, text)| is_content(text))
            .map_or(self.line, |(line, _)| line)
    }
}

/// Splits a file at its document markers. Every line that begins with `---` or `...` is a marker, even in the middle of a
/// block of text (YAML 1.2, section 9.1.2). Empty documents are numbered, but not returned.
pub fn split(file: &str) -> Vec<Document<'_>> {
    let mut documents = Vec::new();
    let mut current = Document { number: 1, line: 1, text: "" };
    let (mut start, mut at) = (0, 0);
    for (line, text) in (1..).zip(file.split_inclusive('\n')) {
        let next = at + text.len();
        if is_marker(text, "---") {
            current.text = &file[start..at];
            let has_content = push(&mut documents, current);
            let number = if has_content || current.line > 1 { current.number + 1 } else { current.number };
            // What follows the marker on its line belongs to the document.
            current = Document { number, line, text: "" };
            start = at + 3;
        } else if is_marker(text, "...") {
            current.text = &file[start..at];
            push(&mut documents, current);
            current = Document { number: current.number + 1, line: line + 1, text: "" };
            start = next;
        }
        at = next;
    }
    current.text = &file[start..];
    push(&mut documents, current);
    documents
}

fn push<'a>(documents: &mut Vec<Document<'a>>, document: Document<'a>) -> bool {
    let has_content = document.text.lines().any(is_content);
    if has_content {
        documents.push(document);
    }
    has_content
}

fn is_content(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with('#') && !line.starts_with('%')
}

fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(file: &str) -> Vec<(usize, u64, &str)> {
        split(file).into_iter().map(|d| (d.number, d.line, d.text)).collect()
    }

    #[test]
    fn a_file_without_markers_is_one_document() {
        assert_eq!(of("a: 1\nb: 2\n"), [(1, 1, "a: 1\nb: 2\n")]);
        assert_eq!(of(""), []);
        assert_eq!(of("# nothing\n\n"), []);
    }

    #[test]
    fn a_marker_before_the_first_document_begins_it() {
        assert_eq!(of("---\na: 1\n---\nb: 2"), [(1, 1, "\na: 1\n"), (2, 3, "\nb: 2")]);
        assert_eq!(of("# title\n---\na: 1\n"), [(1, 2, "\na: 1\n")]);
    }

    #[test]
    fn empty_documents_are_counted_but_left_out() {
        assert_eq!(of("a: 1\n---\n# none\n---\nb: 2\n"), [(1, 1, "a: 1\n"), (3, 4, "\nb: 2\n")]);
    }

    #[test]
    fn a_document_may_begin_on_the_line_of_its_marker() {
        assert_eq!(
            of("--- {a: 1}\n--- # remark\nb: 2\n"),
            [(1, 1, " {a: 1}\n"), (2, 2, " # remark\nb: 2\n")]
        );
    }

    #[test]
    fn only_whole_markers_count() {
        assert_eq!(of("---a: 1\n----\n --- \n").len(), 1);
    }

    #[test]
    fn windows_line_ends_and_end_markers_are_understood() {
        assert_eq!(of("a: 1\r\n---\r\nb: 2\r\n"), [(1, 1, "a: 1\r\n"), (2, 2, "\r\nb: 2\r\n")]);
        assert_eq!(of("a: 1\n...\nb: 2\n"), [(1, 1, "a: 1\n"), (2, 3, "b: 2\n")]);
    }
}
