use super::*;
use crate::lint::source::SourceFile;

fn whats(path: &str, text: &str) -> Vec<String> {
    let file = SourceFile { path: path.into(), text: text.into() };
    let unit = Unit::read(&file).unwrap();
    unit.iter().flat_map(modules).map(|finding| format!("{} {}", finding.line, finding.what)).collect()
}

#[test]
fn a_use_against_the_direction_is_found() {
    assert_eq!(
        whats("proxy-user/src/plan/mod.rs", "\nuse crate::maps::Store;\n"),
        ["2 `plan` may not use `maps`"]
    );
    assert!(
        whats("proxy-user/src/plan/mod.rs", "use crate::model::Service;\nuse crate::plan::types;\n")
            .is_empty()
    );
}

#[test]
fn a_path_in_an_expression_counts_as_much_as_a_use() {
    assert_eq!(
        whats("proxy-user/src/model/a.rs", "fn f() { crate::sync::go() }"),
        ["1 `model` may not use `sync`"]
    );
}

#[test]
fn groups_are_looked_into() {
    let text = "use crate::{\n    maps::{self, Store},\n    model::Service,\n    sync,\n};";
    assert_eq!(
        whats("proxy-user/src/plan/a.rs", text),
        ["1 `plan` may not use `maps`", "1 `plan` may not use `sync`"]
    );
}

#[test]
fn super_counts_when_it_leads_to_the_root() {
    assert_eq!(whats("proxy-user/src/model/mod.rs", "use super::plan::X;"), ["1 `model` may not use `plan`"]);
    assert_eq!(
        whats("proxy-user/src/model/a.rs", "use super::super::plan::X;"),
        ["1 `model` may not use `plan`"]
    );
    // `super` in model/a.rs is `model` itself, which may have a module `plan` of its own.
    assert!(whats("proxy-user/src/model/a.rs", "use super::plan::X;").is_empty());
}

#[test]
fn a_restricted_crate_is_found_outside_its_modules() {
    assert_eq!(whats("proxy-user/src/sync/a.rs", "use aya::Ebpf;"), ["1 `sync` may not use the crate aya"]);
    assert_eq!(
        whats("proxy-user/src/model/a.rs", "type A = kube::Client;"),
        ["1 `model` may not use the crate kube"]
    );
    assert!(whats("proxy-user/src/programs/a.rs", "use aya::Ebpf;").is_empty());
    assert!(whats("proxy-user/src/sync/a.rs", "use self::aya::Ebpf;").is_empty());
}

#[test]
fn comments_tests_and_other_crates_are_free() {
    assert!(whats("proxy-user/src/model/a.rs", "// use crate::sync::X;\n").is_empty());
    assert!(whats("proxy-user/src/model/tests.rs", "use crate::sync::X;\n").is_empty());
    assert!(
        whats("proxy-user/src/model/a.rs", "#[cfg(test)]\nmod tests {\n use crate::sync::X;\n}\n").is_empty()
    );
    assert!(whats("proxy-common/src/a.rs", "use crate::sync::X;\n").is_empty());
}

#[test]
fn a_new_module_needs_a_line() {
    assert_eq!(whats("proxy-user/src/novel.rs", ""), ["0 module `novel` has no line in the table of layers"]);
}

#[test]
fn the_tables_hold_no_cycle() {
    fn reaches(table: &BTreeMap<&str, &[&str]>, from: &str, to: &str) -> bool {
        table[from].iter().any(|next| *next == to || reaches(table, next, to))
    }
    for table in [BTreeMap::from(MODULES), BTreeMap::from(CRATES)] {
        for name in table.keys() {
            assert!(!reaches(&table, name, name), "{name} reaches itself");
        }
    }
}

#[test]
fn crates_are_held_to_their_direction() {
    let package = |name: &str, dependency: &str, kind: &str| {
        format!(
            r#"{{"packages":[{{"name":"{name}","dependencies":[{{"name":"{dependency}","kind":{kind}}}]}}]}}"#
        )
    };
    let count = |text: String| crate_findings(&text).unwrap().len();
    assert_eq!(count(package("proxy-common", "proxy-user", "null")), 1);
    assert_eq!(count(package("proxy-user", "proxy-ebpf", "\"build\"")), 1);
    assert_eq!(count(package("proxy-user", "proxy-ebpf", "\"dev\"")), 0);
    assert_eq!(count(package("proxy-user", "proxy-common", "null")), 0);
    assert_eq!(count(package("newcomer", "serde", "null")), 1);
}
