//! Labels of volumes and snapshots.

use std::collections::BTreeMap;

use blockd_engine::pool::{Control as Command, Outcome, PoolHandle};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Labels;
use blockd_mapper::format::labels::check_key;
use blockd_media::error::{Error, shown};

use super::volumes::{existing, of};
use super::{Control, EventKind};

/// Keys with their values.
pub(super) type Pairs = BTreeMap<String, String>;

/// The labels of a volume with those that a request sets, and without those that it removes.
pub(super) fn changed(present: &Labels, set: &Pairs, remove: &[String]) -> Result<Labels, Error> {
    let invalid = |error| Error::from(MapperError::Label(error));
    let mut pairs = to_message(present);
    for key in remove {
        check_key(key).map_err(invalid)?;
        if set.contains_key(key) {
            return Err(Error::invalid("label", key, "either set or removed"));
        }
        pairs.remove(key);
    }
    pairs.extend(set.iter().map(|(key, value)| (key.clone(), value.clone())));
    Labels::new(pairs).map_err(invalid)
}

/// As the control API has them.
pub(super) fn to_message(labels: &Labels) -> Pairs {
    labels.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

impl Control {
    /// Gives a volume that the caller has locked these labels in place of its own. True if any is
    /// different.
    pub(super) async fn label_locked(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        labels: Labels,
    ) -> Result<bool, Error> {
        let keys: Vec<_> = labels.iter().map(|(key, _)| key.to_owned()).collect();
        let command = Command::Label { volume: volume.id, labels };
        let outcome = pool.control(command).await.map_err(|error| of(pool, error))?;
        let is_changed = matches!(outcome, Outcome::Labelled { .. });
        if is_changed {
            let keys = if keys.is_empty() { "none".to_owned() } else { keys.join(", ") };
            let text = format!("volume {} has other labels: {keys}", shown(&volume.name));
            self.events().publish(EventKind::VolumeConfigured, pool.name(), &volume.name, text);
        }
        Ok(is_changed)
    }

    /// Sets labels of volumes that have just been made, or were there, and that the caller has
    /// locked. True if any is different. Volumes that are new are deleted after an error.
    pub(super) async fn label_new(
        &self,
        pool: &PoolHandle,
        names: &[&str],
        set: &Pairs,
        is_new: bool,
    ) -> Result<bool, Error> {
        let mut wanted = Vec::new();
        for name in names.iter().filter(|_| !set.is_empty()) {
            let volume = existing(pool, name)?;
            let labels = changed(&volume.labels, set, &[])?;
            wanted.push((volume, labels));
        }
        let mut replaced: Vec<&VolumeSummary> = Vec::new();
        for (volume, labels) in &wanted {
            match self.label_locked(pool, volume, labels.clone()).await {
                Ok(true) => replaced.push(volume),
                Ok(false) => {}
                Err(error) if is_new => return Err(self.unmake(pool, names, error).await),
                Err(error) => {
                    let mut undone = Ok(());
                    for volume in replaced {
                        let before = volume.labels.clone();
                        undone =
                            undone.and(self.label_locked(pool, volume, before).await.map(drop));
                    }
                    return Err(match undone {
                        Ok(()) => error.with_note("nothing was changed"),
                        Err(problem) => {
                            error.with_note(&format!("a part of it is left: {problem}"))
                        }
                    });
                }
            }
        }
        Ok(!replaced.is_empty())
    }

    /// Deletes volumes that were made in vain. Returns the error, with those that are left.
    async fn unmake(&self, pool: &PoolHandle, names: &[&str], error: Error) -> Error {
        for name in names {
            let deleted = match existing(pool, name) {
                Ok(volume) => self.delete_locked(pool, &volume, &Default::default()).await,
                Err(error) => Err(error),
            };
            if let Err(problem) = deleted {
                let name = shown(name);
                let left = format!("volume {name} was made and is left, as deleting it failed");
                return error.with_note(&format!("{left}: {problem}"));
            }
        }
        error.with_note("nothing was changed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_set_and_removed_and_the_rest_stays() {
        let pairs = |pairs: &[(&str, &str)]| -> Pairs {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let present = Labels::new([("a", "1"), ("b", "2")]).unwrap();
        let remove = ["a".to_owned(), "gone".to_owned()];
        let found = changed(&present, &pairs(&[("b", "3"), ("c", "")]), &remove).unwrap();
        assert_eq!(to_message(&found), pairs(&[("b", "3"), ("c", "")]));
        let error = |set: &[(&str, &str)], remove: &[&str]| {
            let remove: Vec<_> = remove.iter().map(|key| (*key).to_owned()).collect();
            changed(&present, &pairs(set), &remove).unwrap_err().to_string()
        };
        assert_eq!(error(&[("a", "x")], &["a"]), "label is a: must be either set or removed");
        let text = error(&[], &["-"]);
        assert!(text.starts_with("key of a label is -: must be a name"), "{text}");
        let text = error(&[("k", "\n")], &[]);
        assert!(text.starts_with("label k is"), "{text}");
    }
}
