//! A node: daemon and plugin, with classes for each kind of persistent memory.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_api::v1;
use blockd_csi::proto::NodeGetVolumeStatsRequest;
use blockd_csi::proto::volume_usage::Unit;
use blockd_testkit::tools;

use crate::csi::Driver;
use crate::csi::rig::{Plugin, Rig, Settings};
use crate::workload::csi::life::{self, Shape, Volume};
use crate::workload::guest;
use crate::workload::pmem::{direct, pooled};

pub(super) const MIB: i64 = 1 << 20;
/// Where the disk with what is remembered is mounted, as the daemon's helper does it; and what of
/// it is the plugin's.
const HOME: &str = "/mnt/state/plugin";
/// A scrub takes longer only if it hangs.
const SCRUB: Duration = Duration::from_secs(120);
/// Pools, beside those of [`direct::POOL`] and `default`.
pub(super) const GROWING: &str = "growing";
pub(super) const DISK: &str = "disk";
/// The parameter that names a class.
pub(super) const CLASS: &str = "csi.blockd.io/device-class";
/// Precedes the driver's words in a volume's context.
pub(super) const CONTEXT: &str = "csi.blockd.io";

/// Classes, with those that can't work.
const CLASSES: &str = r#"
[[class]]
name = "pooled"
kind = "pmem-pooled"
pool = "default"
default = true

[[class]]
name = "direct"
kind = "pmem-direct"
pool = "direct"

[[class]]
name = "parted"
kind = "pmem-direct"
pool = "direct"
kata_partition = true

[[class]]
name = "growing"
kind = "pmem-direct"
pool = "growing"

[[class]]
name = "direct-of-disk"
kind = "pmem-direct"
pool = "disk"

[[class]]
name = "direct-of-extents"
kind = "pmem-direct"
pool = "default"

[[class]]
name = "pooled-of-disk"
kind = "pmem-pooled"
pool = "disk"

[[class]]
name = "pooled-of-namespaces"
kind = "pmem-pooled"
pool = "direct"
"#;

pub(super) struct Node {
    pub(super) rig: Rig,
    pub(super) driver: Driver,
    pub(super) short: bool,
    /// The region of volumes that are namespaces.
    pub(super) region: String,
}

impl Node {
    /// Starts both. Their state is on the disk.
    pub(super) fn start([direct, growing, _]: [String; 3], short: bool) -> Result<Self> {
        let tables = format!(
            "{}[[pool]]\nname = \"{GROWING}\"\nkind = \"pmem-direct\"\nregion = \"{growing}\"\n\
             page_map = \"memory\"\n[[pool]]\nname = \"{DISK}\"\npath = \"/dev/vdb\"\n",
            direct::table(&direct)
        );
        let daemon = pooled::daemon("", &tables)?;
        // The kubelet shares its mounts with the containers that it starts.
        guest::shell("mount --make-rshared /")?;
        let settings = Settings {
            config: CLASSES.to_owned(),
            home: Some(PathBuf::from(HOME)),
            ..Settings::default()
        };
        let mut plugin = Plugin::new("pmem", &daemon.control_socket(), &settings)?;
        plugin.start()?;
        let driver = plugin.driver()?;
        Ok(Self { rig: Rig { plugin, daemon }, driver, short, region: direct })
    }

    /// In order, with nothing left.
    pub(super) fn end(mut self) -> Result<()> {
        self.clean("all of it")?;
        guest::no_errors()?;
        self.rig.plugin.stop()?;
        ensure!(self.rig.daemon.stop()?.success(), "{}", self.rig.daemon.last_words());
        Ok(())
    }

    /// Nothing is left, and nothing had to be overwritten in a second try, which comes much later.
    pub(super) fn clean(&self, after: &str) -> Result<()> {
        self.scrubbed(direct::POOL)?;
        self.scrubbed(GROWING)?;
        let log = self.rig.daemon.log();
        let late = log.lines().find(|line| line.contains("it is overwritten later"));
        ensure!(late.is_none(), "after {after}: {late:?}");
        life::nothing_left(&self.rig, after)
    }

    /// One of two, by the form.
    pub(super) fn either<T>(&self, short: T, long: T) -> T {
        if self.short { short } else { long }
    }

    /// The last lines that both have logged.
    pub(super) fn last_words(&self) -> String {
        let Rig { plugin, daemon } = &self.rig;
        format!("the plugin: {}\nthe daemon: {}", plugin.last_words(), daemon.last_words())
    }

    /// A volume of a class, not made yet.
    pub(super) fn volume(
        &self,
        name: &str,
        shape: Shape,
        mib: i64,
        parameters: &[(&str, &str)],
    ) -> Result<Volume> {
        let mut volume = Volume::new(&self.rig, name, shape, mib * MIB)?;
        volume.parameters = owned(parameters);
        Ok(volume)
    }

    /// Made, staged and published once.
    pub(super) fn up(
        &self,
        name: &str,
        shape: Shape,
        mib: i64,
        parameters: &[(&str, &str)],
    ) -> Result<Volume> {
        let mut volume = self.volume(name, shape, mib, parameters)?;
        volume.create(&self.driver)?;
        volume.stage(&self.driver)?;
        volume.publish(&self.driver, 0)?;
        Ok(volume)
    }

    pub(super) fn off(&self, volume: &Volume) -> Result<()> {
        volume.unpublish(&self.driver, 0)?;
        Ok(volume.unstage(&self.driver)?)
    }

    pub(super) fn down(&self, volume: &Volume) -> Result<()> {
        self.off(volume)?;
        volume.delete(&self.driver)?;
        volume.gone()
    }

    /// Both die, and come again.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.rig.plugin.kill()?;
        self.rig.daemon.kill()?;
        self.rig.daemon.start()?;
        self.rig.plugin.start()?;
        self.driver = self.rig.plugin.driver()?;
        Ok(())
    }

    pub(super) fn pool(&self, name: &str) -> Result<v1::Pool> {
        self.rig.control()?.pool_named(name)
    }

    /// Waits until nothing of a pool is being overwritten. Gives what is free then.
    pub(super) fn scrubbed(&self, pool: &str) -> Result<i64> {
        let control = self.rig.control()?;
        tools::wait_until("the scrub", SCRUB, || {
            let pool = control.pool_named(pool).ok()?;
            (pool.scrubbing_bytes == 0).then_some(pool.free_bytes)
        })
    }

    /// The kernel's device of a volume.
    pub(super) fn device(&self, volume: &Volume) -> Result<PathBuf> {
        let found = self.rig.control()?.volume(&volume.id)?;
        ensure!(found.device_path.starts_with("/dev/pmem"), "{found:?}");
        Ok(PathBuf::from(found.device_path))
    }

    /// The total bytes of a mounted volume by its stats, which have to be healthy.
    pub(super) fn total(&self, volume: &Volume) -> Result<i64> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume.id.clone(),
            volume_path: volume.target(0).to_string_lossy().into_owned(),
            ..Default::default()
        };
        let answer = self.driver.node_get_volume_stats(request)?;
        let condition = answer.volume_condition.context("no condition")?;
        ensure!(!condition.abnormal, "{condition:?}");
        let bytes = answer.usage.iter().find(|one| one.unit() == Unit::Bytes);
        Ok(bytes.context("no bytes")?.total)
    }

    /// The value of one of the driver's keys in a volume's context.
    pub(super) fn attribute<'a>(&self, volume: &'a Volume, word: &str) -> Result<&'a str> {
        let found = volume.context.get(&format!("{}/{word}", self.driver.offers().name));
        let found = found.with_context(|| format!("no {word} in {:?}", volume.context))?;
        Ok(found.as_str())
    }
}

/// Parameters as a storage class has them.
fn owned(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let whole = |key: &str| if key == "class" { CLASS } else { key }.to_owned();
    pairs.iter().map(|(key, value)| (whole(key), (*value).to_owned())).collect()
}
