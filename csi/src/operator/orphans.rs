//! `blockd-csi orphans`: volumes of the driver in a node's daemon that no PersistentVolume names.
//! Their PersistentVolume was deleted with the policy Retain, or lost with the cluster's store.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use blockd_api::v1;
use blockd_csi_base::error::shown;
use blockd_csi_base::options::{DEFAULT_DRIVER, check_driver};
use clap::Parser;
use serde::Serialize;

use super::print;
use super::pv::{List, PersistentVolume};
use crate::cells::is_cell;
use crate::daemon::Daemon;
use crate::error::Error;
use crate::ids::{Kind, Names, VolumeId};
use crate::labels;
use crate::parameters::Keys;

/// Lists the driver's volumes of this node's daemon that no PersistentVolume of the cluster names,
/// and deletes them on request. A volume is never deleted while it is attached, while a snapshot of
/// it exists, when it was not made by the plugin, when a PersistentVolume has its name or is in its
/// label, or when it may be younger than the list
#[derive(Clone, Parser, Debug)]
#[command(
    name = "blockd-csi orphans",
    max_term_width = 100,
    after_help = "Example:\n  kubectl get pv -o json >pv.json\n  blockd-csi orphans --pv-list \
                  pv.json\n  blockd-csi orphans --pv-list pv.json --delete default/csi.pvc-1"
)]
pub struct Options {
    /// Only these, as POOL/NAME
    #[arg(value_name = "VOLUME")]
    pub volumes: Vec<String>,

    /// The PersistentVolumes of the cluster, all of them, as `kubectl get pv -o json` prints them:
    /// a file, or "-" for standard input
    #[arg(long, value_name = "FILE")]
    pub pv_list: PathBuf,

    /// Delete nothing that was made less than this before the list, nor before the newest
    /// PersistentVolume in it: a list may be older than its file, and one on standard input counts
    /// as made now. A whole number and s, m, h or d. A volume exists before its PersistentVolume
    /// does, and a provisioner that cannot reach the API server tries for as long as that lasts
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
    pub older: Duration,

    /// Delete the volumes that are named, or all with --yes
    #[arg(long)]
    pub delete: bool,

    /// Delete all that are listed as orphans and that can be deleted
    #[arg(long, requires = "delete", conflicts_with = "volumes")]
    pub yes: bool,

    /// Delete although no PersistentVolume of the list names a volume of this node, as after all of
    /// them were deleted. By an empty list, or one of another cluster, every volume is an orphan
    #[arg(long, requires = "delete")]
    pub allow_unmatched_list: bool,

    /// Name of the driver, as in the CSIDriver object
    #[arg(long, value_name = "NAME", default_value = DEFAULT_DRIVER)]
    pub driver_name: String,

    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", default_value = "/run/blockd/control.sock")]
    pub blockd_socket: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The answer.
#[derive(Serialize, Debug)]
pub struct Answer {
    /// PersistentVolumes of the driver in the list.
    persistent_volumes: usize,
    orphans: Vec<Orphan>,
    deleted: usize,
}

/// A volume that no PersistentVolume names.
#[derive(Serialize, Debug)]
pub struct Orphan {
    volume_id: String,
    size_bytes: i64,
    mapped_bytes: i64,
    class: Option<String>,
    /// NAMESPACE/NAME of its claim, when it was made.
    claim: Option<String>,
    persistent_volume: Option<String>,
    /// 0 where it is not known.
    made_unix_ms: i64,
    /// Why it is not deleted.
    kept: Option<String>,
    deleted: bool,
    /// The daemon's number of it, which is not used again.
    #[serde(skip)]
    number: u32,
}

/// The PersistentVolume that may be a volume's although it has another id: the pool was renamed, or
/// the volume moved, and this is the copy that stayed.
fn related<'a>(volume: &v1::Volume, list: &'a List) -> Option<&'a PersistentVolume> {
    let label = volume.labels.get(labels::PV_NAME);
    list.volumes.iter().find(|one| {
        let name = one.handle().split_once('/').map(|(_, name)| name);
        name == Some(volume.name.as_str()) || label.is_some_and(|label| label == one.name())
    })
}

/// Reads a time: a whole number and `s`, `m`, `h` or `d`.
fn time(text: &str) -> Result<Duration, String> {
    let form = || "must be like 90s, 30m, 1h or 7d".to_owned();
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(form)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(form()),
    };
    let number: u32 = digits.parse().map_err(|_| form())?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

impl Options {
    /// Prints the orphans, and deletes them on request.
    ///
    /// # Errors
    /// An option is out of range, the list can't be read, the daemon does not answer, or a named
    /// volume can't be deleted.
    pub async fn run(&self) -> Result<(), Error> {
        check_driver(&self.driver_name)?;
        if self.delete && !self.yes && self.volumes.is_empty() {
            let allowed = "given with the volumes to delete, or with --yes for all";
            return Err(Error::invalid("--delete", "given alone", allowed));
        }
        let list = List::read(&self.pv_list, &self.driver_name)?;
        let daemon = Daemon::new(self.blockd_socket.clone());
        let (answer, ended) = self.answer(&daemon, &list).await?;
        print(self.json.then_some(&answer), || answer.text(self.delete))?;
        ended
    }

    /// Finds the orphans, and deletes them on request. The second part is the error that ended the
    /// deletion early.
    ///
    /// # Errors
    /// As [`Self::run`]; nothing was changed.
    pub async fn answer(
        &self,
        daemon: &Daemon,
        list: &List,
    ) -> Result<(Answer, Result<(), Error>), Error> {
        let names = Names::new(&self.driver_name);
        let (mut orphans, matched) = self.find(daemon, list, &names).await?;
        if self.delete && matched == 0 && !orphans.is_empty() && !self.allow_unmatched_list {
            let problem = format!(
                "a list of {} PersistentVolumes of {}, of which none is for a volume of this node",
                list.volumes.len(),
                self.driver_name
            );
            let allowed = "the list of this cluster, or used with --allow-unmatched-list: by it \
                           every volume of the driver is an orphan";
            return Err(Error::invalid("--pv-list", problem, allowed));
        }
        if !self.volumes.is_empty() {
            self.check_named(&orphans, list, &names)?;
            orphans.retain(|one| self.volumes.contains(&one.volume_id));
        }
        let mut answer = Answer { persistent_volumes: list.volumes.len(), orphans, deleted: 0 };
        let ended = if self.delete { answer.delete(daemon, &names).await } else { Ok(()) };
        Ok((answer, ended))
    }

    /// The orphans, and the number of volumes that are none.
    async fn find(
        &self,
        daemon: &Daemon,
        list: &List,
        names: &Names,
    ) -> Result<(Vec<Orphan>, usize), Error> {
        let all = daemon.volumes("").await?;
        let known: BTreeSet<&str> = list.volumes.iter().map(|one| one.handle()).collect();
        let mut snapshots: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for one in all.iter().filter(|one| one.kind() == v1::VolumeKind::Snapshot) {
            // By name, and by origin where it was renamed.
            let by_name = one.name.split('@').next().unwrap_or_default();
            for source in BTreeSet::from([by_name, one.origin.as_str()]) {
                *snapshots.entry((&one.pool, source)).or_default() += 1;
            }
        }
        let is_ours = |one: &&v1::Volume| {
            let is_volume = one.kind() == v1::VolumeKind::Volume;
            // One in a cell may be of another node's claim, and has another id.
            is_volume && names.kind(&one.name) == Kind::Volume && !is_cell(&one.pool)
        };
        let (mut orphans, mut matched) = (Vec::new(), 0);
        for one in all.iter().filter(is_ours) {
            let id = VolumeId { pool: one.pool.clone(), name: one.name.clone() }.to_string();
            if known.contains(id.as_str()) {
                matched += 1;
                continue;
            }
            let count = snapshots.get(&(&one.pool, &one.name)).copied().unwrap_or(0);
            orphans.push(self.orphan(one, id, count, list));
        }
        orphans.sort_by(|one, other| one.volume_id.cmp(&other.volume_id));
        Ok((orphans, matched))
    }

    fn orphan(
        &self,
        volume: &v1::Volume,
        volume_id: String,
        snapshots: usize,
        list: &List,
    ) -> Orphan {
        let label = |key: &str| volume.labels.get(key).cloned();
        let class = label(&Keys::new(&self.driver_name).device_class());
        let claim = label(labels::CLAIM_NAMESPACE).zip(label(labels::CLAIM_NAME));
        let kept = self.kept(volume, class.is_some(), snapshots, list);
        Orphan {
            volume_id,
            size_bytes: volume.size_bytes,
            mapped_bytes: volume.mapped_bytes,
            class,
            claim: claim.map(|(namespace, name)| format!("{namespace}/{name}")),
            persistent_volume: label(labels::PV_NAME),
            made_unix_ms: volume.made_unix_ms,
            kept,
            deleted: false,
            number: volume.id,
        }
    }

    /// Why a volume is not deleted. `has_class`: it has the plugin's label.
    fn kept(
        &self,
        volume: &v1::Volume,
        has_class: bool,
        snapshots: usize,
        list: &List,
    ) -> Option<String> {
        if volume.attached || volume.connections > 0 {
            return Some("it is attached".to_owned());
        }
        if !has_class {
            return Some("it has no label of the plugin, which may not have made it".to_owned());
        }
        if snapshots > 0 {
            return Some(format!("it has snapshots: {snapshots}"));
        }
        if let Some(one) = related(volume, list) {
            let name = shown(one.name());
            return Some(format!("PersistentVolume {name} has its name, or is in its label"));
        }
        if volume.made_unix_ms <= 0 {
            return Some("it is not known when it was made".to_owned());
        }
        let older_ms = i64::try_from(self.older.as_millis()).unwrap_or(i64::MAX);
        let is_young = |than_ms: i64| volume.made_unix_ms > than_ms.saturating_sub(older_ms);
        if is_young(list.made_unix_ms) {
            return Some("it was made less than --older before the list".to_owned());
        }
        list.newest_unix_ms.is_some_and(is_young).then(|| {
            "it was made less than --older before the newest PersistentVolume of the list, or \
             after it: a newer list may name it"
                .to_owned()
        })
    }

    /// Refuses names of volumes that are no orphans, or that are to be deleted and can't be. One
    /// that does not exist was deleted before.
    fn check_named(&self, orphans: &[Orphan], list: &List, names: &Names) -> Result<(), Error> {
        for id in &self.volumes {
            if names.parse_volume(id).is_none() {
                let allowed = format!("POOL/NAME of a volume of {}", self.driver_name);
                return Err(Error::invalid("VOLUME", id, allowed));
            }
            if let Some(by) = list.volumes.iter().find(|one| one.handle() == id) {
                let problem = format_args!("belongs to PersistentVolume {}", shown(by.name()));
                return Err(Error::in_use(format_args!("volume {id}"), problem));
            }
            let kept = orphans.iter().find(|one| one.volume_id == *id);
            if let Some(why) = kept.and_then(|one| one.kept.as_ref()).filter(|_| self.delete) {
                let problem = format_args!("is kept: {why}");
                return Err(Error::in_use(format_args!("volume {id}"), problem));
            }
        }
        Ok(())
    }
}

impl Answer {
    /// Deletes all that are not kept. A volume that was attached meanwhile is refused by the daemon
    /// and kept; any other error ends it.
    async fn delete(&mut self, daemon: &Daemon, names: &Names) -> Result<(), Error> {
        for one in self.orphans.iter_mut().filter(|one| one.kept.is_none()) {
            let Some(id) = names.parse_volume(&one.volume_id) else { continue };
            // Another volume may have got the name meanwhile.
            let now = daemon.find_volume(&id.pool, &id.name).await?;
            if now.is_none_or(|now| now.id != one.number) {
                one.kept = Some("it was deleted meanwhile".to_owned());
                continue;
            }
            let (name, pool) = (id.name, id.pool);
            let request =
                v1::DeleteVolumeRequest { name, pool, force: false, ..Default::default() };
            match daemon.delete_volume(request).await {
                Ok(answer) => {
                    one.deleted = answer.changed;
                    self.deleted += usize::from(answer.changed);
                }
                Err(error) if error.daemon_kind() == Some(v1::ErrorKind::InUse) => {
                    one.kept = Some(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The answer in lines.
    #[must_use]
    pub fn text(&self, deletes: bool) -> String {
        let mut text = String::new();
        for one in &self.orphans {
            let state = match &one.kept {
                Some(why) => format!("kept, {why}"),
                None if one.deleted => "deleted".to_owned(),
                None if deletes => "not deleted".to_owned(),
                None => "can be deleted".to_owned(),
            };
            let facts = [("class", &one.class), ("claim", &one.claim)];
            let facts = facts.iter().filter_map(|(name, value)| {
                value.as_ref().map(|value| format!(", {name} {}", shown(value)))
            });
            let _ = writeln!(
                text,
                "{}: {} bytes, {} of them mapped{}: {state}",
                shown(&one.volume_id),
                one.size_bytes,
                one.mapped_bytes,
                facts.collect::<String>()
            );
        }
        let (found, free) =
            (self.orphans.len(), self.orphans.iter().filter(|one| one.kept.is_none()).count());
        let ended = if deletes {
            format!("{} deleted", self.deleted)
        } else {
            format!("{free} can be deleted")
        };
        let _ = writeln!(
            text,
            "{found} volumes without a PersistentVolume, {ended}; the list has {} of the driver",
            self.persistent_volumes
        );
        text
    }
}
