use std::collections::BTreeMap;

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
        whats("proxy-user/src/rates/mod.rs", "\nuse crate::driver::Driver;\n"),
        ["2 `rates` may not use `driver`"]
    );
    assert!(
        whats("proxy-user/src/rates/mod.rs", "use crate::maps::View;\nuse crate::rates::Rate;\n").is_empty()
    );
}

#[test]
fn a_path_in_an_expression_counts_as_much_as_a_use() {
    assert_eq!(
        whats("proxy-user/src/maps/a.rs", "fn f() { crate::driver::go() }"),
        ["1 `maps` may not use `driver`"]
    );
}

#[test]
fn groups_are_looked_into() {
    let text = "use crate::{\n    driver::{self, Driver},\n    maps::View,\n    host,\n};";
    assert_eq!(
        whats("proxy-user/src/rates/a.rs", text),
        ["1 `rates` may not use `driver`", "1 `rates` may not use `host`"]
    );
}

#[test]
fn super_counts_when_it_leads_to_the_root() {
    assert_eq!(whats("proxy-user/src/maps/mod.rs", "use super::rates::X;"), ["1 `maps` may not use `rates`"]);
    assert_eq!(
        whats("proxy-user/src/maps/a.rs", "use super::super::rates::X;"),
        ["1 `maps` may not use `rates`"]
    );
    // `super` in maps/a.rs is `maps` itself, which may have a module `rates` of its own.
    assert!(whats("proxy-user/src/maps/a.rs", "use super::rates::X;").is_empty());
}

#[test]
fn a_restricted_crate_is_found_outside_its_modules() {
    assert_eq!(
        whats("proxy-user/src/driver/a.rs", "use aya::Ebpf;"),
        ["1 `driver` may not use the crate aya"]
    );
    assert_eq!(
        whats("proxy-user/src/maps/a.rs", "type A = kube::Client;"),
        ["1 `maps` may not use the crate kube"]
    );
    assert!(whats("proxy-user/src/programs/a.rs", "use aya::Ebpf;").is_empty());
    assert!(whats("proxy-user/src/driver/a.rs", "use self::aya::Ebpf;").is_empty());
}

#[test]
fn comments_tests_and_other_crates_are_free() {
    assert!(whats("proxy-user/src/maps/a.rs", "// use crate::driver::X;\n").is_empty());
    assert!(whats("proxy-user/src/maps/tests.rs", "use crate::driver::X;\n").is_empty());
    assert!(
        whats("proxy-user/src/maps/a.rs", "#[cfg(test)]\nmod tests {\n use crate::driver::X;\n}\n")
            .is_empty()
    );
    assert!(whats("proxy-common/src/a.rs", "use crate::driver::X;\n").is_empty());
}

#[test]
fn use_of_the_kernel_below_it_is_found() {
    for text in ["use crate::kernel::maps::X;", "fn f() { aya_ebpf::helpers::x() }"] {
        assert_eq!(
            whats("proxy-ebpf/src/socket/a.rs", text),
            ["1 `socket` may not use `kernel` or the crate aya_ebpf"]
        );
        assert!(whats("proxy-ebpf/src/kernel/a.rs", text).is_empty());
    }
    assert!(whats("proxy-ebpf/src/socket/a.rs", "use crate::env::X;").is_empty());
}

#[test]
fn a_new_module_needs_a_line() {
    assert_eq!(whats("proxy-user/src/novel.rs", ""), ["0 module `novel` has no line in the table of layers"]);
}

#[test]
fn the_table_has_no_cycle() {
    fn reaches(table: &BTreeMap<&str, &[&str]>, from: &str, to: &str) -> bool {
        table[from].iter().any(|next| *next == to || reaches(table, next, to))
    }
    let table = BTreeMap::from(MODULES);
    for name in table.keys() {
        assert!(!reaches(&table, name, name), "{name} reaches itself");
    }
}
