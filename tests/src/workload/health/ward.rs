//! A daemon and a plugin under observation: the condition of a volume by each side, and how long it
//! takes to be reported.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::list_volumes_response::Entry;
use blockd_csi::proto::{
    ControllerGetVolumeRequest, ListVolumesRequest, NodeGetVolumeStatsRequest, VolumeCondition,
};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon;
use serde_json::Value;
use tonic::Code;

use crate::csi::Driver;
use crate::csi::rig::{Rig, Settings};
use crate::workload::csi::life::{Shape, Volume};

/// Longer than this nothing takes to be seen, or to be gone, on a machine that is an emulated one.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(100);
/// Looks at the side that is to see nothing, after the other has seen something: what comes to it
/// late is seen too.
const LOOKS: u32 = 5;
/// Bytes that a message may have.
const MESSAGE: usize = 128;
/// Looks often and lets go soon, so that minutes are enough for all.
const HEALTH: &str = "[health]\ninterval = \"1s\"\nhold = \"2s\"\nerrors_hold = \"4s\"\n";
/// IO that is made slow is to be seen.
pub(super) const SLOW: &str = "250ms";
/// None is made slow, and a machine that shares its disk is not to look ill.
pub(super) const NEVER_SLOW: &str = "20s";

/// By bytes, and not by how fast was written, and without slowing anything down for long.
const SPACE: &str = "[pool.space]\nlow = \"64M\"\nvery_low = \"4M\"\n";

/// The side that checks a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Pool, map and devices below.
    Controller,
    /// Device, mount and file system.
    Node,
}

impl Side {
    const ALL: [Self; 2] = [Self::Controller, Self::Node];

    fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Node => "node",
        }
    }
}

/// Trouble: its name, who is to see it, and what the message has to have in it.
#[derive(Clone, Copy)]
pub(super) struct Trouble<'a> {
    pub(super) cause: &'static str,
    pub(super) side: Side,
    pub(super) says: &'static [&'static str],
    /// IO done between looks, for what shows itself only so.
    pub(super) reads: Option<&'a dyn Fn()>,
    /// The controller has no such volume meanwhile.
    pub(super) absent: bool,
}

/// The observations so far.
#[derive(Debug, Default)]
pub(super) struct Table {
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    cause: &'static str,
    side: Side,
    after: Duration,
    message: String,
    recovered: Duration,
}

impl Table {
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    /// Seconds that the slowest took to be seen.
    pub(super) fn slowest(&self) -> f64 {
        self.lines.iter().map(|line| line.after.as_secs_f64()).fold(0.0, f64::max)
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{:<28} {:<10} {:>7}  {:>9}  {}\n",
            "cause", "seen by", "after", "recovered", "message"
        );
        for Line { cause, side, after, message, recovered } in &self.lines {
            let (after, recovered) = (after.as_secs_f64(), recovered.as_secs_f64());
            let side = side.name();
            let _ = writeln!(
                text,
                "{cause:<28} {side:<10} {after:>5.1} s  {recovered:>7.1} s  {message}"
            );
        }
        text
    }
}

/// Daemon, plugin, and what they are asked with.
#[derive(Debug)]
pub(super) struct Ward<'a> {
    pub(super) rig: Rig,
    pub(super) driver: Driver,
    table: &'a mut Table,
    /// Prints events into a file.
    events: Child,
    events_file: PathBuf,
    made: u32,
    /// The daemon was started anew since the trouble began.
    restarted: bool,
}

impl<'a> Ward<'a> {
    /// With a pool on this disk.
    pub(super) fn start(
        name: &str,
        pool: &Path,
        slow_io: &str,
        table: &'a mut Table,
    ) -> Result<Self> {
        let daemon = settings(pool, slow_io);
        let log = "info".to_owned();
        let rig = Rig::start(name, &Settings { daemon, log, ..Settings::default() })?;
        let driver = rig.plugin.driver()?;
        let events_file = rig.daemon.folder().join("events");
        let events = listen(&rig, &events_file)?;
        Ok(Self { rig, driver, table, events, events_file, made: 0, restarted: false })
    }

    /// A volume that a pod uses.
    pub(super) fn up(&mut self, shape: Shape, bytes: u64) -> Result<Volume> {
        self.made += 1;
        let name = format!("v{}", self.made);
        let mut volume = Volume::new(&self.rig, &name, shape, i64::try_from(bytes)?)?;
        volume.create(&self.driver)?;
        self.publish(&volume)?;
        Ok(volume)
    }

    /// Stages and publishes it.
    pub(super) fn publish(&self, volume: &Volume) -> Result<()> {
        volume.stage(&self.driver)?;
        volume.publish(&self.driver, 0)?;
        Ok(())
    }

    /// The other way.
    pub(super) fn unpublish(&self, volume: &Volume) -> Result<()> {
        volume.unpublish(&self.driver, 0)?;
        volume.unstage(&self.driver)?;
        Ok(())
    }

    pub(super) fn down(&self, volume: &Volume) -> Result<()> {
        self.unpublish(volume)?;
        volume.delete(&self.driver)?;
        volume.gone()
    }

    /// The condition by the list and by name: both have to have one. None for a volume that does
    /// not exist: it is not listed then.
    fn controller(&self, id: &str) -> Result<Option<VolumeCondition>> {
        let list = self.driver.list_volumes(ListVolumesRequest::default())?;
        let is_it = |entry: &Entry| entry.volume.as_ref().is_some_and(|one| one.volume_id == id);
        let listed = list.entries.into_iter().find(is_it);
        let request = ControllerGetVolumeRequest { volume_id: id.to_owned() };
        let answer = match self.driver.controller_get_volume(request) {
            Ok(answer) => answer,
            Err(status) if status.code() == Code::NotFound => {
                ensure!(listed.is_none(), "{id} is listed, and not found by name");
                return Ok(None);
            }
            Err(status) => return Err(status.into()),
        };
        let listed = listed.and_then(|entry| entry.status).and_then(|all| all.volume_condition);
        ensure!(listed.is_some(), "{id} is not listed with a condition");
        let condition = answer.status.and_then(|status| status.volume_condition);
        Ok(Some(condition.context("the controller says nothing of the condition")?))
    }

    fn node(&self, id: &str, path: &Path) -> Result<VolumeCondition> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: path.to_string_lossy().into_owned(),
            ..Default::default()
        };
        let answer = self.driver.node_get_volume_stats(request)?;
        answer.volume_condition.context("the node says nothing of the condition")
    }

    /// A volume's condition by one side; none if the volume is not found.
    fn look(&self, side: Side, volume: &Volume) -> Result<Option<VolumeCondition>> {
        let condition = match side {
            Side::Controller => self.controller(&volume.id),
            Side::Node => self.node(&volume.id, &volume.target(0)).map(Some),
        };
        let condition = condition.with_context(|| format!("the {} looks", side.name()))?;
        if let Some(VolumeCondition { message, .. }) = &condition {
            ensure!(!message.is_empty() && message.len() <= MESSAGE, "the message is {message:?}");
        }
        Ok(condition)
    }

    /// Waits until both sides call a volume healthy.
    pub(super) fn healthy(&self, volume: &Volume) -> Result<()> {
        let start = Clock::start();
        for side in Side::ALL {
            loop {
                let condition = self.look(side, volume)?;
                if condition.as_ref().is_some_and(|condition| !condition.abnormal) {
                    break;
                }
                ensure!(
                    start.elapsed() < PATIENCE,
                    "the {} does not see that it is well: {condition:?}; {}",
                    side.name(),
                    self.says()
                );
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Waits until the message of this side has all that it is to have.
    fn seen(&self, trouble: &Trouble<'_>, volume: &Volume) -> Result<String> {
        let start = Clock::start();
        loop {
            if let Some(reads) = trouble.reads {
                reads();
            }
            let condition = self.look(trouble.side, volume)?;
            let fits = |one: &VolumeCondition| {
                one.abnormal && trouble.says.iter().all(|part| one.message.contains(part))
            };
            if let Some(condition) = condition.as_ref().filter(|one| fits(one)) {
                return Ok(condition.message.clone());
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "{}: the {} says {condition:?}, not {:?}; {}",
                trouble.cause,
                trouble.side.name(),
                trouble.says,
                self.says()
            );
            std::thread::sleep(PAUSE);
        }
    }

    /// One fault is reported by one side: the other sees nothing, or no volume where there is none.
    fn unseen(&self, trouble: &Trouble<'_>, volume: &Volume) -> Result<()> {
        for side in Side::ALL.into_iter().filter(|side| *side != trouble.side) {
            for _ in 0..LOOKS {
                let condition = self.look(side, volume)?;
                let well = match &condition {
                    None => trouble.absent,
                    Some(condition) => !condition.abnormal && !trouble.absent,
                };
                ensure!(well, "{}: the {} says {condition:?}", trouble.cause, side.name());
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Brings trouble about, waits until it is seen, mends it, and waits until it is gone.
    pub(super) fn trouble(
        &mut self,
        trouble: &Trouble<'_>,
        volume: &Volume,
        cause: impl FnOnce(&mut Self) -> Result<()>,
        mend: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let name = trouble.cause;
        let pool = volume.id.split_once('/').map_or("", |(pool, _)| pool).to_owned();
        self.healthy(volume).with_context(|| format!("before {name}"))?;
        let known = self.past_events()?.len();
        self.restarted = false;
        let start = Clock::start();
        cause(self).with_context(|| format!("causing {name}"))?;
        let message = self.seen(trouble, volume)?;
        let after = start.elapsed();
        self.unseen(trouble, volume)?;
        let start = Clock::start();
        mend(self).with_context(|| format!("mending {name}"))?;
        self.healthy(volume).with_context(|| format!("after {name}"))?;
        let recovered = start.elapsed();
        // A daemon that was started anew remembers no trouble.
        if trouble.side == Side::Controller && !self.restarted {
            self.recovered_once(&pool, known, name)?;
        }
        let side = trouble.side;
        println!("{name}: {} after {:.1} s: {message}", side.name(), after.as_secs_f64());
        let cause = trouble.cause;
        self.table.lines.push(Line { cause, side, after, message, recovered });
        Ok(())
    }

    /// Each pool or volume that was in trouble is reported as recovered exactly once.
    fn recovered_once(&mut self, pool: &str, known: usize, name: &str) -> Result<()> {
        let start = Clock::start();
        loop {
            let events = self.past_events()?;
            let kinds = |kind: &str| -> Vec<&Value> {
                let new = events.get(known..).unwrap_or_default().iter();
                new.filter(|event| event["kind"] == kind && event["pool"] == pool).collect()
            };
            let (begun, ended) = (kinds("health_abnormal"), kinds("health_recovered"));
            let mut subjects: Vec<&Value> = begun.iter().map(|event| &event["volume"]).collect();
            subjects.sort_by_key(ToString::to_string);
            subjects.dedup();
            let times =
                |one: &&Value| ended.iter().filter(|event| event["volume"] == **one).count();
            if !subjects.is_empty() && subjects.iter().all(|one| times(one) == 1) {
                return Ok(());
            }
            let more = subjects.iter().any(|one| times(one) > 1);
            if more || start.elapsed() > PATIENCE {
                bail!("{name}: events of trouble {begun:?}, of its end {ended:?}");
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Events so far.
    fn past_events(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(&self.events_file)?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).context("an event")).collect()
    }

    /// The daemon's health by its own account, for messages.
    fn says(&self) -> String {
        let said = self.rig.daemon.cli(&["health"]);
        format!("{said:?}; {}; {}", self.rig.daemon.last_words(), self.rig.plugin.last_words())
    }

    /// Ends the daemon, does something, and starts it again.
    pub(super) fn restart(
        &mut self,
        meanwhile: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.rig.daemon.stop()?;
        self.events.wait()?;
        meanwhile(self)?;
        self.rig.daemon.start()?;
        self.events = listen(&self.rig, &self.events_file)?;
        self.restarted = true;
        Ok(())
    }

    /// Ends both in order.
    pub(super) fn end(mut self) -> Result<()> {
        self.rig.plugin.stop()?;
        let status = self.rig.daemon.stop()?;
        self.events.wait()?;
        ensure!(status.success(), "the daemon's end: {}", self.rig.daemon.last_words());
        Ok(())
    }
}

/// A daemon with a pool on this disk, to which IO that takes longer than `slow_io` is slow.
pub(super) fn settings(pool: &Path, slow_io: &str) -> daemon::Settings {
    daemon::Settings {
        pool: Some(pool.to_path_buf()),
        tables: format!("{HEALTH}slow_io = {slow_io:?}\n"),
        pool_lines: SPACE.to_owned(),
        ..daemon::Settings::default()
    }
}

/// Writes events to a file from now on, those that are remembered first.
fn listen(rig: &Rig, path: &Path) -> Result<Child> {
    let file = fs::File::options().create(true).append(true).open(path)?;
    let mut command = Command::new(blockd_testkit::tools::blockd()?);
    command.env("BLOCKD_SOCKET", rig.daemon.control_socket());
    command.args(["--json", "events", "--replay"]).stdin(Stdio::null()).stdout(file);
    command.spawn().context("listening to events")
}
