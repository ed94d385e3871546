//! Reads a `KubeProxyConfiguration`. The error names every invalid part with its place, not only the first one.
//!
//! As kube-proxy (`loadConfig` in cmd/kube-proxy/app/options.go, "lenient decoding"), it only warns of fields that it does not
//! know and of repeated fields, of which the last one counts: files of old clusters have fields of earlier versions. It reads the
//! first document of a file.

use std::fmt;
use std::path::Path;

use serde_saphyr::{Location, Spanned};

use super::fields::{Modes, SETTINGS, Setting};
use super::tree::Node;
use super::values::{Given, Values};

/// The API version of the files.
pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
/// The kind of the files.
pub const KIND: &str = "KubeProxyConfiguration";

/// The errors of a file: one line for each invalid part, `FILE:LINE:COLUMN: ...`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct FileError(pub Vec<String>);

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

/// Reads a file; also returns its text.
pub fn read(path: &Path) -> Result<(String, Values), FileError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| FileError(vec![format!("cannot read --config {}: {error}", path.display())]))?;
    let values = parse(&path.display().to_string(), &text)?;
    Ok((text, values))
}

/// Parses the text of a file; `name` is its name in errors.
pub fn parse(name: &str, text: &str) -> Result<Values, FileError> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::PassThrough,
    };
    let first = first_document(text);
    let document: Spanned<Node> = serde_saphyr::from_str_with_options(first, options).map_err(|error| {
        let place = error.location().map_or_else(|| name.to_owned(), |location| place(name, location));
        let message = error.to_string();
        // The parser appends the place; here the place is in front.
        let message = message.rfind(" at line ").map_or(&*message, |at| &message[..at]);
        FileError(vec![format!("{place}: {message}")])
    })?;
    let mut reader = Reader { name, values: Values::default(), errors: Vec::new() };
    reader.document(&document);
    if let Some(rest) = text.get(first.len()..).filter(|rest| rest.lines().skip(1).any(has_content)) {
        let (line, end) = (first.lines().count() + 1, rest.lines().count());
        reader.values.ignored.push(format!(
            "{name}:{line}:1 is ignored: only the first document is read, and {end} lines follow"
        ));
    }
    let Reader { mut values, mut errors, .. } = reader;
    let (proxy, local) =
        (values.text("mode").map(str::to_owned), values.text("detectLocalMode").map(str::to_owned));
    let (proxy, local) = (proxy.unwrap_or_else(|| "iptables".to_owned()), local.unwrap_or_default());
    errors.extend(values.settle(Modes { proxy: &proxy, local: &local, is_file: true }));
    if errors.is_empty() { Ok(values) } else { Err(FileError(errors)) }
}

/// Returns the text before the second document.
fn first_document(text: &str) -> &str {
    let (mut begun, mut at) = (false, 0);
    for line in text.split_inclusive('\n') {
        let marker =
            line.strip_prefix("---").filter(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace));
        if marker.is_some() && begun {
            return &text[..at];
        }
        begun |= marker.is_some() || has_content(line);
        at += line.len();
    }
    text
}

/// Whether the line is more than a comment or a directive.
fn has_content(line: &str) -> bool {
    let line = line.trim_start_matches('\u{feff}').trim();
    !line.is_empty() && !line.starts_with(['#', '%'])
}

fn place(name: &str, location: Location) -> String {
    format!("{name}:{}:{}", location.line(), location.column())
}

struct Reader<'a> {
    name: &'a str,
    values: Values,
    errors: Vec<String>,
}

impl Reader<'_> {
    fn error(&mut self, at: Location, message: &dyn fmt::Display) {
        self.errors.push(format!("{}: {message}", place(self.name, at)));
    }

    fn ignore(&mut self, at: Location, why: &dyn fmt::Display) {
        self.values.ignored.push(format!("{} is ignored: {why}", place(self.name, at)));
    }

    fn document(&mut self, document: &Spanned<Node>) {
        let Node::Map(entries) = &document.value else {
            self.error(
                document.referenced,
                &format!(
                    "not a {KIND}: expected a mapping with `apiVersion: {API_VERSION}` and `kind: {KIND}`, found {}",
                    document.value
                ),
            );
            return;
        };
        for (field, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
            match entries.iter().rfind(|(key, _)| key.value == field) {
                Some((_, value)) if value.value == Node::Text(expected.to_owned()) => {}
                Some((_, value)) => {
                    self.error(
                        value.referenced,
                        &format!("{field}: cannot read {}; give {expected}", value.value),
                    );
                }
                None => self.error(document.referenced, &format!("{field} is missing; give {expected}")),
            }
        }
        self.mapping("", entries);
    }

    fn mapping(&mut self, above: &str, entries: &[(Spanned<String>, Spanned<Node>)]) {
        for (number, (key, value)) in entries.iter().enumerate() {
            if entries[number + 1..].iter().any(|(later, _)| later.value == key.value) {
                self.ignore(key.referenced, &format!("{} is given again below", path_of(above, &key.value)));
                continue;
            }
            if above.is_empty() && matches!(&*key.value, "apiVersion" | "kind") {
                continue;
            }
            let path = path_of(above, &key.value);
            if let Some(setting) = Setting::of_field(&path) {
                self.setting(setting, value);
                continue;
            }
            if !Setting::has_below(&path) {
                let hint = meant(&path).map(|field| format!("; did you mean {field}?")).unwrap_or_default();
                self.ignore(key.referenced, &format!("unknown field {path}{hint}"));
                continue;
            }
            match &value.value {
                Node::Map(entries) => self.mapping(&path, entries),
                Node::Null => {}
                other => {
                    self.error(
                        value.referenced,
                        &format!("{path}: {other} is not a mapping; give fields below it"),
                    );
                }
            }
        }
    }

    fn setting(&mut self, setting: &'static Setting, node: &Spanned<Node>) {
        let at = node.referenced;
        let shown = match &node.value {
            Node::List(items) => {
                let items: Vec<_> = items.iter().map(|item| item.value.to_string()).collect();
                format!("[{}]", items.join(", "))
            }
            other => other.to_string(),
        };
        let value = setting.kind.of_node(&node.value);
        match value.or_else(|wrong| setting.unfit(&shown, wrong).map(Some)) {
            Ok(Some(value)) => {
                let place = format!("{}: {}", place(self.name, at), setting.field);
                self.values.insert(setting, Given { value, place });
            }
            Ok(None) => {}
            Err(expected) => {
                self.error(at, &format!("{}: {shown} is not valid; {expected}", setting.field));
            }
        }
    }
}

/// Returns the path of a field below another one.
fn path_of(above: &str, field: &str) -> String {
    if above.is_empty() { field.to_owned() } else { format!("{above}.{field}") }
}

/// Returns the field that was probably meant by this name: with the same letters, or with the same name in another section.
fn meant(path: &str) -> Option<&'static str> {
    let last = |path: &'static str| path.rsplit('.').next().unwrap_or(path);
    let name = path.rsplit('.').next().unwrap_or(path);
    let fields = || SETTINGS.iter().map(|setting| setting.field).filter(|field| !field.is_empty());
    fields()
        .find(|field| field.eq_ignore_ascii_case(path))
        .or_else(|| fields().find(|field| last(field).eq_ignore_ascii_case(name)))
}
