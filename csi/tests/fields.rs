//! The interface on the wire is that of the specification: `fields.txt` has every field, value and
//! method, and none changes.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

/// A message's, enum's or service's name, and number, name and type of its members.
type Row = (String, i32, String, String);

const PACKAGE: &str = ".csi.v1.";

fn present() -> BTreeSet<Row> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");
    let files = protox::compile([format!("{folder}/csi.proto")], [folder])
        .expect("the description of the interface compiles");
    let mut rows = BTreeSet::new();
    let file = files.file.iter().find(|file| file.package() == "csi.v1");
    let file = file.expect("the package is there");
    for message in &file.message_type {
        add_message("", message, &mut rows);
    }
    for list in &file.enum_type {
        add_enum("", list, &mut rows);
    }
    for (number, method) in file.service.iter().flat_map(|service| (1..).zip(&service.method)) {
        let service = file.service.iter().find(|one| one.method.contains(method));
        let service = service.expect("a method is of a service").name().to_owned();
        let stream = if method.server_streaming() { "stream-of-" } else { "" };
        let named = |text: &str| text.trim_start_matches(PACKAGE).to_owned();
        let (input, output) = (named(method.input_type()), named(method.output_type()));
        rows.insert((
            service,
            number,
            method.name().to_owned(),
            format!("{input}->{stream}{output}"),
        ));
    }
    rows
}

fn add_message(outer: &str, message: &prost_types::DescriptorProto, rows: &mut BTreeSet<Row>) {
    let name = format!("{outer}{}", message.name());
    // A map's entries have no name of their own in the specification.
    let is_map = |nested: &&prost_types::DescriptorProto| {
        nested.options.as_ref().is_some_and(|options| options.map_entry())
    };
    for field in &message.field {
        let base = field.r#type().as_str_name().trim_start_matches("TYPE_").to_lowercase();
        let named = field.type_name().trim_start_matches(PACKAGE);
        let base = if named.is_empty() { base.as_str() } else { named };
        let repeated = field.label().as_str_name() == "LABEL_REPEATED";
        let mut maps = message.nested_type.iter().filter(is_map);
        let kind = match (repeated, maps.any(|map| base.ends_with(map.name()))) {
            (_, true) => "map".to_owned(),
            (true, _) => format!("{base}[]"),
            (false, _) => base.to_owned(),
        };
        rows.insert((name.clone(), field.number(), field.name().to_owned(), kind));
    }
    for nested in message.nested_type.iter().filter(|nested| !is_map(nested)) {
        add_message(&format!("{name}."), nested, rows);
    }
    for list in &message.enum_type {
        add_enum(&format!("{name}."), list, rows);
    }
}

fn add_enum(outer: &str, list: &prost_types::EnumDescriptorProto, rows: &mut BTreeSet<Row>) {
    for value in &list.value {
        let name = format!("{outer}{}", list.name());
        rows.insert((name, value.number(), value.name().to_owned(), "value".to_owned()));
    }
}

#[test]
fn the_interface_is_that_of_the_specification() {
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [of, number, name, kind] = words[..] else {
            panic!("fields.txt: {line:?} is not MESSAGE NUMBER NAME TYPE")
        };
        let number = number.parse().expect("a number");
        (of.to_owned(), number, name.to_owned(), kind.to_owned())
    };
    let lines = include_str!("fields.txt").lines();
    let golden: BTreeSet<Row> = lines.filter(|line| !line.starts_with('#')).map(row).collect();
    let present = present();
    let text = |rows: Vec<&Row>| {
        let line = |row: &&Row| format!("{} {} {} {}\n", row.0, row.1, row.2, row.3);
        rows.iter().map(line).collect::<String>()
    };
    let gone = text(golden.difference(&present).collect());
    let new = text(present.difference(&golden).collect());
    assert!(gone.is_empty() && new.is_empty(), "gone or changed:\n{gone}new:\n{new}");
}

#[test]
fn secret_fields_are_marked() {
    let text = include_str!("../proto/csi.proto");
    let secrets: Vec<&str> = text.lines().filter(|line| line.contains("> secrets = ")).collect();
    // In the specification's 1.12.
    assert_eq!(secrets.len(), 19);
    let next = |line: &str| text.lines().skip_while(move |one| *one != line).nth(1);
    for line in secrets {
        let both = format!("{line}{}", next(line).unwrap_or_default());
        assert!(both.contains("csi_secret) = true"), "{line}");
    }
}
