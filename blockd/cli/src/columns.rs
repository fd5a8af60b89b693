//! The columns of `blockd list`, by which it can be sorted as well.

use std::cmp::Ordering;

use blockd_api::v1::{Volume, VolumeSettings};
use blockd_media::error::Error;

use super::labels::{self, Pairs};
use super::output::table::{Cell, Side, Table};
use super::output::terminal::Tone;
use super::{Context, amount, answers};

/// A column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    value: fn(&Volume) -> Value<'_>,
}

/// The value of a column for one volume.
#[derive(Debug)]
enum Value<'a> {
    /// Rises from A to Z. Empty for none.
    Word(&'a str, Tone),
    /// The largest first, as all numbers.
    Bytes(i64),
    /// The same where 0 means that there is none.
    Limit(i64),
    Count(u64),
    /// Milliseconds since 1970, 0 where that is not known. The newest first.
    Date(i64),
    /// In the order of their keys. Empty for none.
    Labels(&'a Pairs),
}

const fn column(name: &'static str, value: fn(&Volume) -> Value<'_>) -> Column {
    Column { name, value }
}

/// All columns; the first [`USUAL`] are shown where none are named.
pub(crate) const ALL: [Column; 21] = [
    column("name", |one| Value::Word(&one.name, Tone::Plain)),
    column("pool", |one| Value::Word(&one.pool, Tone::Plain)),
    column("size", |one| Value::Bytes(one.size_bytes)),
    column("mapped", |one| Value::Bytes(one.mapped_bytes)),
    column("state", |one| Value::Word(answers::state(one), tone(one))),
    column("from", |one| Value::Word(&one.origin, Tone::Plain)),
    column("conn", |one| Value::Count(one.connections.into())),
    column("where", |one| match answers::place(one) {
        "" => Value::Word(&one.device_problem, Tone::Plain),
        place => Value::Word(place, Tone::Plain),
    }),
    column("kind", |one| Value::Word(one.kind().word(), Tone::Plain)),
    column("id", |one| Value::Count(one.id.into())),
    column("made", |one| Value::Date(one.made_unix_ms)),
    column("block-size", |one| Value::Bytes(one.block_size.into())),
    column("valid", |one| Value::Bytes(one.valid_bytes)),
    column("exclusive", |one| Value::Bytes(one.exclusive_bytes)),
    column("shared", |one| Value::Bytes(one.shared_bytes)),
    column("reserved", |one| Value::Bytes(one.reserved_bytes)),
    column("set-aside", |one| Value::Bytes(one.set_aside_free_bytes)),
    column("quota", |one| Value::Limit(settings(one).quota_bytes)),
    column("iops", |one| Value::Count(settings(one).iops)),
    column("bandwidth", |one| Value::Limit(settings(one).bandwidth_bytes)),
    column(LABELS, |one| Value::Labels(&one.labels)),
];

/// The column of labels.
pub(crate) const LABELS: &str = "labels";

/// How many columns are shown where none are named.
const USUAL: usize = 8;

/// Columns that take the daemon time to count.
const COUNTED: [&str; 2] = ["exclusive", "shared"];

fn settings(volume: &Volume) -> VolumeSettings {
    volume.settings.unwrap_or_default()
}

fn tone(volume: &Volume) -> Tone {
    match (volume.attached, volume.device_problem.is_empty()) {
        (_, false) => Tone::Bad,
        (true, true) => Tone::Good,
        (false, true) => Tone::Dim,
    }
}

impl Column {
    /// The column of that name, which was given by this option.
    pub(crate) fn named(option: &str, name: &str) -> Result<Self, Error> {
        let found = ALL.into_iter().find(|column| column.name == name);
        let names = || ALL.map(|column| column.name).join(", ");
        found.ok_or_else(|| Error::invalid(option, name, format!("one of {}", names())))
    }

    /// The columns of a list with commas. Each has to be there once.
    pub(crate) fn listed(option: &str, list: Option<&str>) -> Result<Vec<Self>, Error> {
        let Some(list) = list else { return Ok(ALL[..USUAL].to_vec()) };
        let mut columns: Vec<Self> = Vec::new();
        for name in list.split(',') {
            if columns.iter().any(|column| column.name == name) {
                return Err(Error::invalid(option, name, "named once"));
            }
            columns.push(Self::named(option, name)?);
        }
        Ok(columns)
    }

    /// Whether the daemon has to count something for it.
    pub(crate) fn is_counted(&self) -> bool {
        COUNTED.contains(&self.name)
    }

    /// Sorts volumes by this column. Equal ones keep their order.
    pub(crate) fn sort(&self, volumes: &mut [Volume]) {
        volumes.sort_by(|a, b| (self.value)(a).order(&(self.value)(b)));
    }

    fn side(&self) -> Side {
        match (self.value)(&Volume::default()) {
            Value::Word(..) | Value::Date(_) | Value::Labels(_) => Side::Left,
            Value::Bytes(_) | Value::Limit(_) | Value::Count(_) => Side::Right,
        }
    }
}

impl Value<'_> {
    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Value::Word(one, _), Value::Word(other, _)) => one.cmp(other),
            (Value::Labels(one), Value::Labels(other)) => one.cmp(other),
            (Value::Count(one), Value::Count(other)) => other.cmp(one),
            (one, other) => other.number().cmp(&one.number()),
        }
    }

    fn number(&self) -> i64 {
        match *self {
            Value::Bytes(number) | Value::Limit(number) | Value::Date(number) => number,
            Value::Word(..) | Value::Count(_) | Value::Labels(_) => 0,
        }
    }

    fn cell(&self, context: &Context) -> Cell {
        match *self {
            Value::Word("", _) | Value::Limit(0) | Value::Date(0) => "-".into(),
            Value::Labels(labels) if labels.is_empty() => "-".into(),
            Value::Labels(labels) => {
                labels.iter().map(labels::shown).collect::<Vec<_>>().join(",").into()
            }
            Value::Word(word, tone) => Cell::toned(word, tone),
            Value::Bytes(bytes) | Value::Limit(bytes) => context.output.size(amount(bytes)).into(),
            Value::Count(count) => count.to_string().into(),
            Value::Date(unix_ms) => answers::date(unix_ms).into(),
        }
    }
}

/// Volumes as a table of these columns.
pub(crate) fn table(volumes: &[Volume], columns: &[Column], context: &Context) -> String {
    let titles: Vec<_> = columns.iter().map(|column| (column.name, column.side())).collect();
    let mut table = Table::new(&titles);
    for volume in volumes {
        table.row(columns.iter().map(|column| (column.value)(volume).cell(context)));
    }
    table.render(context.output.terminal())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn sorted(key: &str) -> Vec<String> {
        let volume = |name: &str, size_bytes, mapped_bytes, origin: &str, made_unix_ms| Volume {
            name: name.to_owned(),
            size_bytes,
            mapped_bytes,
            origin: origin.to_owned(),
            made_unix_ms,
            ..Volume::default()
        };
        let mut all =
            [volume("a", 10, 3, "", 7), volume("b", 30, 3, "z", 9), volume("c", 20, 5, "y", 8)];
        Column::named("sort", key).unwrap().sort(&mut all);
        all.map(|one| one.name).to_vec()
    }

    #[test]
    fn words_rise_and_numbers_fall_and_equal_ones_keep_their_order() {
        let cases = [
            ("name", ["a", "b", "c"]),
            ("size", ["b", "c", "a"]),
            ("mapped", ["c", "a", "b"]),
            ("from", ["a", "c", "b"]),
            ("made", ["b", "c", "a"]),
            ("quota", ["a", "b", "c"]),
        ];
        for (key, expected) in cases {
            assert_eq!(sorted(key), expected, "{key}");
        }
    }

    #[test]
    fn a_column_that_is_not_known_or_is_there_twice_is_refused() {
        let error = Column::named("sort", "colour").unwrap_err().to_string();
        assert!(error.starts_with("sort is colour: must be one of name, pool, size"), "{error}");
        for (list, problem) in [
            ("name,colour", "columns is colour: must be one of"),
            ("name,", r#"columns is "": must be one of"#),
            ("name,size,name", "columns is name: must be named once"),
        ] {
            let error = Column::listed("columns", Some(list)).unwrap_err().to_string();
            assert!(error.starts_with(problem), "{list}: {error}");
        }
        let names = |list| {
            let columns = Column::listed("columns", list).unwrap();
            columns.iter().map(|column| column.name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(Some("size,name")), "size name");
        assert_eq!(names(None), "name pool size mapped state from conn where");
    }

    #[test]
    fn the_help_names_every_column() {
        let mut command = super::super::args::Arguments::command();
        let list = command.find_subcommand_mut("list").unwrap();
        let help = list.render_long_help().to_string().replace('\n', " ");
        for Column { name, .. } in ALL {
            assert!(help.contains(&format!(" {name}")), "{name}: {help}");
        }
    }
}
