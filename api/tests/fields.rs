//! Field numbers mean the same forever: `fields.txt` has every field that was ever there.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

/// A message's or enum's name, and number, name and type of one of its fields.
type Field = (String, i32, String, String);

struct Description {
    present: BTreeSet<Field>,
    /// Numbers that must not be used again, by message, the end not part of it.
    reserved_numbers: BTreeMap<String, Vec<(i32, i32)>>,
    reserved_names: BTreeMap<String, BTreeSet<String>>,
}

fn description() -> Description {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");
    let files = protox::compile([format!("{folder}/blockd/v1/control.proto")], [folder])
        .expect("the description of the API compiles");
    let mut present = BTreeSet::new();
    let mut reserved_numbers = BTreeMap::new();
    let mut reserved_names = BTreeMap::new();
    for file in &files.file {
        for message in &file.message_type {
            let name = message.name().to_owned();
            for field in &message.field {
                let base = field.r#type().as_str_name().trim_start_matches("TYPE_").to_lowercase();
                let named = field.type_name().trim_start_matches(".blockd.v1.");
                let base = if named.is_empty() { &base } else { named };
                let repeated = field.label().as_str_name() == "LABEL_REPEATED";
                let kind = if repeated { format!("{base}[]") } else { base.to_owned() };
                present.insert((name.clone(), field.number(), field.name().to_owned(), kind));
            }
            let ranges = message.reserved_range.iter().map(|range| (range.start(), range.end()));
            reserved_numbers.insert(name.clone(), ranges.collect());
            reserved_names.insert(name, message.reserved_name.iter().cloned().collect());
        }
        for list in &file.enum_type {
            let name = list.name().to_owned();
            for value in &list.value {
                let kind = "value".to_owned();
                present.insert((name.clone(), value.number(), value.name().to_owned(), kind));
            }
            let ranges = list.reserved_range.iter().map(|range| (range.start(), range.end() + 1));
            reserved_numbers.insert(name.clone(), ranges.collect());
            reserved_names.insert(name, list.reserved_name.iter().cloned().collect());
        }
    }
    Description { present, reserved_numbers, reserved_names }
}

fn golden() -> BTreeSet<Field> {
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [message, number, name, kind] = words[..] else {
            panic!("fields.txt: {line:?} is not MESSAGE NUMBER NAME TYPE")
        };
        let number = number.parse().expect("a field number");
        (message.to_owned(), number, name.to_owned(), kind.to_owned())
    };
    include_str!("fields.txt").lines().filter(|line| !line.starts_with('#')).map(row).collect()
}

#[test]
fn a_field_that_is_gone_is_reserved() {
    let description = description();
    for (message, number, name, kind) in golden().difference(&description.present) {
        let ranges = description.reserved_numbers.get(message);
        let reserved = ranges.is_some_and(|ranges| {
            ranges.iter().any(|(start, end)| (*start..*end).contains(number))
        });
        assert!(
            reserved,
            "{message} had field {number} {name} of type {kind}, which is gone or changed: say \
             `reserved {number}`, and give what is new another number"
        );
        let names = description.reserved_names.get(message);
        assert!(
            names.is_some_and(|names| names.contains(name)),
            "{message}: say `reserved \"{name}\"` too"
        );
    }
}

fn lines<'a>(fields: impl Iterator<Item = &'a Field>) -> String {
    fields
        .map(|(message, number, name, kind)| format!("{message} {number} {name} {kind}\n"))
        .collect()
}

/// With `BLOCKD_WRITE_FIELDS` set, the file gets the lines that it lacks.
#[test]
fn a_new_field_is_recorded() {
    let (present, golden) = (description().present, golden());
    if std::env::var_os("BLOCKD_WRITE_FIELDS").is_some() && std::env::var_os("CI").is_none() {
        let comments = include_str!("fields.txt").lines().filter(|line| line.starts_with('#'));
        let comments: String = comments.map(|line| format!("{line}\n")).collect();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fields.txt");
        let text = comments + &lines(golden.union(&present));
        std::fs::write(path, text).expect("fields.txt can be written");
        return;
    }
    let missing = lines(present.difference(&golden));
    assert!(
        missing.is_empty(),
        "add to api/tests/fields.txt, or run this with BLOCKD_WRITE_FIELDS=1:\n{missing}"
    );
}

#[test]
fn a_size_in_bytes_has_its_older_form_beside_it() {
    let present = description().present;
    let older: BTreeMap<&str, i32> = present
        .iter()
        .filter(|(_, _, name, _)| name.ends_with("size_gb"))
        .map(|(message, number, _, _)| (message.as_str(), *number))
        .collect();
    assert!(older.len() >= 6, "{older:?}");
    assert!(older.values().all(|number| *number == 2), "{older:?}");
    for message in older.keys() {
        let newer = present.iter().find(|(of, number, name, kind)| {
            of == message && *number == 6 && name.ends_with("size_bytes") && kind == "int64"
        });
        assert!(newer.is_some(), "{message} has size_gb and no size_bytes with number 6");
    }
    for (message, _, name, _) in present.iter().filter(|field| field.2 == "size_bytes") {
        assert!(older.contains_key(message.as_str()), "{message} has {name} and no size_gb");
    }
}
