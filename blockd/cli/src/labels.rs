//! Labels on the command line.

use std::collections::BTreeMap;

use blockd_media::error::Error;

/// Keys with their values.
pub(crate) type Pairs = BTreeMap<String, String>;

/// Labels of what a command makes.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct LabelArguments {
    /// Give it this label; may be repeated. KEY is a name of up to 63 letters, digits, '.', '_' and
    /// '-', or a DNS name, '/' and such a name; VALUE is up to 256 bytes, or empty
    #[arg(long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<String>,
}

impl LabelArguments {
    /// The labels by key.
    pub(crate) fn pairs(&self) -> Result<Pairs, Error> {
        pairs(&self.labels)
    }
}

/// Labels as `KEY=VALUE`, by key.
pub(crate) fn pairs(texts: &[String]) -> Result<Pairs, Error> {
    let mut pairs = Pairs::new();
    for text in texts {
        let (key, value) =
            text.split_once('=').ok_or_else(|| Error::invalid("label", text, "KEY=VALUE"))?;
        insert(&mut pairs, key, value)?;
    }
    Ok(pairs)
}

/// Labels as `KEY=VALUE`, and as `KEY-` those to be removed.
pub(crate) fn changes(texts: &[String]) -> Result<(Pairs, Vec<String>), Error> {
    let (mut set, mut removed) = (Pairs::new(), Vec::new());
    for text in texts {
        match (text.split_once('='), text.strip_suffix('-')) {
            (Some((key, value)), _) => insert(&mut set, key, value)?,
            (None, Some(key)) => removed.push(key.to_owned()),
            (None, None) => return Err(Error::invalid("label", text, "KEY=VALUE, or KEY-")),
        }
    }
    Ok((set, removed))
}

fn insert(pairs: &mut Pairs, key: &str, value: &str) -> Result<(), Error> {
    match pairs.insert(key.to_owned(), value.to_owned()) {
        None => Ok(()),
        Some(_) => Err(Error::invalid("label", key, "there once")),
    }
}

/// Whether labels have all of these.
pub(crate) fn has_all(labels: &Pairs, wanted: &Pairs) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// One label as it is shown.
pub(crate) fn shown((key, value): (&String, &String)) -> String {
    format!("{key}={value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn labels_are_set_with_a_sign_and_removed_with_a_dash() {
        let (set, removed) = changes(&owned(&["a=b=c", "x.y/z=", "old-"])).unwrap();
        assert_eq!(set.into_iter().map(|one| one.1).collect::<Vec<_>>(), ["b=c", ""]);
        assert_eq!(removed, ["old"]);
        for bad in [&["key"][..], &[""], &["a=1", "a=2"]] {
            let error = changes(&owned(bad)).unwrap_err().to_string();
            assert!(error.starts_with("label is "), "{error}");
        }
        assert!(pairs(&owned(&["old-"])).is_err() && pairs(&owned(&["old-=x"])).is_ok());
    }

    #[test]
    fn a_filter_is_met_by_all_of_its_labels() {
        let labels = pairs(&owned(&["a=1", "b="])).unwrap();
        let has = |wanted: &[&str]| has_all(&labels, &pairs(&owned(wanted)).unwrap());
        assert!(has(&[]) && has(&["a=1"]) && has(&["b=", "a=1"]));
        assert!(!has(&["a=2"]) && !has(&["a=1", "c="]));
    }
}
