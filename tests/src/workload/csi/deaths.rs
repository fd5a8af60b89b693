//! Plugin and daemon die at every step of a volume's life. The plugin logs each step before it
//! takes it; when the line with a number comes, one of them is killed, at once or a moment later.
//! Then the call is repeated, and the life goes on, or is given up and undone. Nothing may be left,
//! and no written data may be lost.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use blockd_testkit::clock::Clock;

use super::encryption;
use super::life::{self, Shape, Volume};
use super::node::insist;
use crate::csi::rig::Rig;
use crate::csi::{Answer, Driver};

const MIB: i64 = 1 << 20;

/// How long a call may take while something dies. A caller that waits longer calls again.
const CALL: Duration = Duration::from_secs(60);

/// The process that dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Plugin,
    Daemon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Create,
    Stage,
    Publish(u32),
    Write,
    Grow,
    NodeGrow,
    Unpublish(u32),
    Unstage,
    Delete,
}

/// A volume to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    shape: Shape,
    encrypted: bool,
}

/// Lives, by turns. Each has every call that its shape has.
const KINDS: [Kind; 6] = [
    plain(Shape::Mount("ext4")),
    plain(Shape::Block),
    plain(Shape::Inline),
    plain(Shape::Mount("xfs")),
    plain(Shape::Mount("btrfs")),
    Kind { shape: Shape::Mount("ext4"), encrypted: true },
];

const fn plain(shape: Shape) -> Kind {
    Kind { shape, encrypted: false }
}

fn life_of(shape: Shape) -> Vec<Call> {
    use Call::{Create, Delete, Grow, NodeGrow, Publish, Stage, Unpublish, Unstage, Write};
    if shape == Shape::Inline {
        return vec![Publish(0), Write, Unpublish(0)];
    }
    vec![
        Create,
        Stage,
        Publish(0),
        Write,
        Publish(1),
        Grow,
        NodeGrow,
        Unpublish(0),
        Unpublish(1),
        Unstage,
        Delete,
    ]
}

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    lives: u64,
    met: u64,
    given_up: u64,
}

/// A life of each kind, then lives with deaths until the time is over, and at least one.
///
/// # Errors
/// When a repeat does not mend something, or something is left or lost.
pub(super) fn all(rig: &mut Rig, time: Duration, seed: u64) -> Result<String> {
    let start = Clock::start();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut figures = Figures::default();
    // Lines of a life, by shape; counted in lives without a death.
    let mut lines = Vec::new();
    for kind in KINDS {
        let count = live(rig, kind, None, &mut figures)?;
        println!("{kind:?} logs {count} lines, {:.1} s", start.elapsed().as_secs_f64());
        lines.push(count);
    }
    // Each line is a point for either to die at. They come by chance, so that those that were met
    // lie anywhere, whenever the time is over.
    let mut points = Vec::new();
    for (kind, count) in KINDS.into_iter().zip(lines) {
        points.extend((1..=count).map(|line| (kind, Victim::Plugin, line)));
        points.extend((1..=count).map(|line| (kind, Victim::Daemon, line)));
    }
    rng.shuffle(&mut points);
    let mut tried = 0;
    let since = Clock::start();
    for &(kind, victim, line) in &points {
        let delay = Duration::from_micros(if rng.bool() { 0 } else { rng.u64(..30_000) });
        let death = Death { victim, line, delay, give_up: rng.u8(..3) == 0 };
        live(rig, kind, Some(death), &mut figures)
            .with_context(|| format!("{kind:?}, {death:?}; {}", rig.plugin.last_words()))?;
        tried += 1;
        if since.elapsed() > time {
            break;
        }
    }
    let Figures { lives, met, given_up } = figures;
    println!("deaths: {met} of {lives} lives, {:.1} s", start.elapsed().as_secs_f64());
    ensure!(met > 0, "no process died");
    let all = points.len();
    Ok(format!("{met} deaths at {tried} of {all} points, {given_up} calls of them given up"))
}

/// A death.
#[derive(Clone, Copy, Debug)]
struct Death {
    victim: Victim,
    /// The number of the line that the plugin logs in a life.
    line: u64,
    /// After that line.
    delay: Duration,
    /// The call in progress is undone, rather than repeated.
    give_up: bool,
}

struct Living {
    driver: Driver,
    volume: Volume,
    grown: bool,
}

/// A life, and perhaps a death in it. Returns the number of lines that the plugin logged.
fn live(rig: &mut Rig, kind: Kind, death: Option<Death>, figures: &mut Figures) -> Result<u64> {
    let shape = kind.shape;
    let size = if shape == Shape::Mount("xfs") { 300 * MIB } else { 200 * MIB };
    let name = format!("life-{}", figures.lives);
    let mut volume = Volume::new(rig, &name, shape, size)?;
    if kind.encrypted {
        encryption::encrypt(&mut volume, "life");
    }
    let driver = rig.plugin.client(CALL)?;
    let mut log = Log::at_end(rig)?;
    let mut living = Living { driver, volume, grown: false };
    let calls = life_of(shape);
    let mut done = 0;
    if let Some(death) = death {
        // The victim dies in one of these calls, or not at all.
        done = living.until(rig, &calls, death)?;
    }
    if done < calls.len()
        && let Some(death) = death
    {
        figures.met += 1;
        living.driver = rig.plugin.client(CALL)?;
        if death.give_up && calls[done] != Call::Create {
            figures.given_up += 1;
            living.undo(&calls[..=done])?;
            done = calls.len();
        }
    }
    for call in &calls[done..] {
        insist(&format!("{call:?}"), || living.call(*call))?;
    }
    living.volume.gone()?;
    figures.lives += 1;
    life::nothing_left(rig, &format!("{kind:?}, {death:?}"))?;
    log.lines()
}

/// Lines of the plugin's log from here on.
struct Log {
    file: File,
    lines: u64,
}

impl Log {
    fn at_end(rig: &Rig) -> Result<Self> {
        let mut file = File::open(rig.plugin.log_path())?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file, lines: 0 })
    }

    fn lines(&mut self) -> Result<u64> {
        let mut more = Vec::new();
        self.file.read_to_end(&mut more)?;
        let ends = more.iter().filter(|&&byte| byte == b'\n').count();
        self.lines += u64::try_from(ends)?;
        Ok(self.lines)
    }
}

impl Living {
    fn call(&mut self, call: Call) -> Answer<()> {
        let size = self.volume.size;
        let Self { driver, volume, .. } = self;
        match call {
            Call::Create => volume.create(driver),
            Call::Stage => volume.stage(driver),
            Call::Publish(number) => volume.publish(driver, number),
            Call::Write => {
                self.write().map_err(|error| tonic::Status::data_loss(format!("{error:#}")))
            }
            Call::Grow => {
                let size = if self.grown { size } else { size + 8 * MIB };
                self.grown = true;
                volume.grow(driver, size)
            }
            // The answer on an old kernel is that it has to be staged anew.
            Call::NodeGrow => match volume.node_grow(driver, 0) {
                Err(status) if status.message().contains("staged the next time") => Ok(()),
                other => other.map(drop),
            },
            Call::Unpublish(number) => {
                self.compare().map_err(|error| tonic::Status::data_loss(format!("{error:#}")))?;
                self.volume.unpublish(&self.driver, number)
            }
            Call::Unstage => volume.unstage(driver),
            Call::Delete => volume.delete(driver),
        }
    }

    fn write(&self) -> Result<()> {
        let target = self.volume.target(0);
        if self.volume.shape == Shape::Block {
            let file = File::options().write(true).open(target)?;
            file.write_all_at(&[0xc3; 4096], 1 << 20)?;
            file.sync_all()?;
        } else {
            let file = File::create(target.join("file"))?;
            file.write_all_at(&[0xc3; 4096], 0)?;
            file.sync_all()?;
            File::open(&target)?.sync_all()?;
        }
        Ok(())
    }

    /// Checks that the written data is there as long as the volume is published at the first path.
    fn compare(&self) -> Result<()> {
        let target = self.volume.target(0);
        let table = fs::read_to_string("/proc/self/mountinfo")?;
        let path = target.display().to_string();
        if !table.lines().any(|line| line.split(' ').nth(4) == Some(&path)) {
            return Ok(());
        }
        let (file, at) = match self.volume.shape {
            Shape::Block => (target, 1 << 20),
            _ => (target.join("file"), 0),
        };
        if !file.exists() {
            // Given up before anything was written.
            return Ok(());
        }
        let mut bytes = [0; 4096];
        File::open(&file)?.read_exact_at(&mut bytes, at)?;
        ensure!(bytes == [0xc3; 4096] || bytes == [0; 4096], "{} holds {bytes:?}", file.display());
        Ok(())
    }

    /// Calls until a process dies; returns the position of the call in which that happened, which
    /// is to be repeated, or the number of calls if none died. The dead process is started again at
    /// once: IO on devices waits for that.
    fn until(&mut self, rig: &mut Rig, calls: &[Call], death: Death) -> Result<usize> {
        let mut log = Log::at_end(rig)?;
        let (over, dead) = (AtomicBool::new(false), AtomicBool::new(false));
        let (over, dead) = (&over, &dead);
        std::thread::scope(|scope| {
            let killer = scope.spawn(move || -> Result<()> {
                while log.lines()? < death.line {
                    if over.load(Ordering::Acquire) {
                        return Ok(());
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                std::thread::sleep(death.delay);
                dead.store(true, Ordering::Release);
                match death.victim {
                    Victim::Plugin => rig.plugin.kill().and_then(|()| rig.plugin.start()),
                    Victim::Daemon => rig.daemon.kill().and_then(|()| rig.daemon.start().map(drop)),
                }
            });
            let mut reached = calls.len();
            let mut result = Ok(());
            for (index, call) in calls.iter().enumerate() {
                let answer = self.call(*call);
                if let Err(status) = &answer {
                    // Without a death no call fails.
                    let died = dead.load(Ordering::Acquire);
                    result = if died { Ok(()) } else { Err(anyhow!("{call:?}: {status}")) };
                }
                if answer.is_err() || dead.load(Ordering::Acquire) {
                    reached = index;
                    break;
                }
            }
            over.store(true, Ordering::Release);
            killer.join().map_err(|_| anyhow!("a thread panicked"))??;
            result.map(|()| reached)
        })
    }

    /// Undoes what these calls have done, the last of them perhaps.
    fn undo(&mut self, calls: &[Call]) -> Result<()> {
        let mut undo = Vec::new();
        for call in calls {
            match call {
                Call::Create => undo.push(Call::Delete),
                Call::Stage => undo.push(Call::Unstage),
                Call::Publish(number) => undo.push(Call::Unpublish(*number)),
                _ => {}
            }
        }
        for call in undo.iter().rev() {
            insist(&format!("{call:?} of what was given up"), || self.call(*call))?;
        }
        Ok(())
    }
}
