use rstest::rstest;

use super::*;
use crate::args::list::ViewArgs;
use crate::output::Watch;

#[derive(Clone, serde::Serialize)]
struct Item {
    name: &'static str,
    address: &'static str,
    count: u64,
}

fn list(items: &[Item]) -> List<Item> {
    let columns = [
        Column::new("NAME"),
        Column::new("AT").wide(),
        Column::new("COUNT").number(),
        Column::new("AGE").clock(),
    ];
    let mut list = List::new("items", columns, "Nothing.");
    for item in items {
        let cells =
            vec![item.name.to_owned(), item.address.to_owned(), item.count.to_string(), "1s".to_owned()];
        let (key, name) = (item.name.to_owned(), item.name.to_owned());
        list.push(Row { group: "items", name, key, cells, value: item.clone() });
    }
    list
}

fn items() -> Vec<Item> {
    vec![
        Item { name: "b", address: "10.0.0.10:80", count: 9 },
        Item { name: "a", address: "10.0.0.9:80", count: 10 },
        Item { name: "c", address: "10.0.0.9:8", count: 1 },
    ]
}

#[rstest]
#[case("name", "a\nb\nc\n")]
#[case("count", "c\nb\na\n")]
#[case(".count", "c\nb\na\n")]
#[case("{.count}", "c\nb\na\n")]
#[case("COUNT", "c\nb\na\n")]
#[case("address", "c\na\nb\n")]
#[case("at", "c\na\nb\n")]
fn rows_are_sorted(#[case] field: &str, #[case] expected: &str) {
    let mut list = list(&items());
    list.sort_by(field).unwrap();
    assert_eq!(list.render(Output::Name, true).unwrap(), expected);
}

#[test]
fn unknown_field_of_an_empty_list_is_reported() {
    let empty = list(&[]);
    assert!(empty.unchecked("nope").unwrap().starts_with("--sort-by nope: no such column"));
    assert_eq!((empty.unchecked("{.count}"), list(&items()).unchecked("nope")), (None, None));
}

#[test]
fn a_field_that_is_null_in_all_rows_is_a_field() {
    let mut list = List::new("items", [Column::new("NAME")], "Nothing.");
    for name in ["b", "a"] {
        let (cells, value) = (vec![name.to_owned()], serde_json::json!({ "missing": null }));
        list.push(Row { group: "items", name: name.to_owned(), key: name.to_owned(), cells, value });
    }
    list.sort_by("missing").unwrap();
    assert_eq!(list.render(Output::Name, true).unwrap(), "b\na\n");
}

#[test]
fn a_mistyped_field_is_an_error_with_the_nearest() {
    let error = list(&items()).sort_by("adress").unwrap_err().to_string();
    assert!(
        error.contains("did you mean address?") && error.contains("address, count, name, AT, AGE"),
        "{error}"
    );
}

#[test]
fn the_forms_of_a_list() {
    let list = list(&items()[..1]);
    let render = |output, with_headings| list.render(output, with_headings).unwrap();
    assert_eq!(render(Output::Text, true), "NAME  COUNT  AGE\nb         9  1s\n");
    assert_eq!(render(Output::Wide, false), "b  10.0.0.10:80  9  1s\n");
    assert_eq!(render(Output::Yaml, true), "items:\n- name: b\n  address: 10.0.0.10:80\n  count: 9\n");
    assert_eq!(render(Output::Name, true), "b\n");
}

#[derive(clap::Parser)]
struct Options {
    #[command(flatten)]
    list: ViewArgs,
}

fn options(flags: &[&str]) -> ViewArgs {
    <Options as clap::Parser>::parse_from(["list", "--watch"].iter().chain(flags)).list
}

#[test]
fn a_watch_prints_what_changes() {
    let (mut watch, options) = (Watch::default(), options(&[]));
    let mut items = items();
    let first = watch.changes(&list(&items[..2]), &options).unwrap();
    assert_eq!(first, "NAME  COUNT  AGE\nb         9  1s\na        10  1s\n");
    assert_eq!(watch.changes(&list(&items[..2]), &options).unwrap(), "");
    items[0].count = 12;
    let second = watch.changes(&list(&items), &options).unwrap();
    assert_eq!(second, "b        12  1s\nc         1  1s\n", "under the same columns");
    assert_eq!(watch.changes(&list(&items[1..]), &options).unwrap(), "", "a removed row is not printed");
}

#[test]
fn event_column_keeps_its_width() {
    let (mut watch, options) = (Watch::default(), options(&["--output-watch-events"]));
    let first = watch.changes(&list(&items()[..1]), &options).unwrap();
    assert_eq!(first, "EVENT     NAME  COUNT  AGE\nADDED     b         9  1s\n");
}

#[test]
fn watch_prints_event_types_if_requested() {
    let (mut watch, options) = (Watch::default(), options(&["--output-watch-events", "-o", "json"]));
    let items = items();
    watch.changes(&list(&items[..1]), &options).unwrap();
    let lines = watch.changes(&list(&items[1..2]), &options).unwrap();
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&events[0]["type"], &events[0]["object"]["name"]), (&"ADDED".into(), &"a".into()));
    assert_eq!((&events[1]["type"], &events[1]["object"]["name"]), (&"DELETED".into(), &"b".into()));
}
