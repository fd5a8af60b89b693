//! The tools of the command line: `import` and `export` beside programs of others that copy the
//! same bytes to and from the same daemon, and `list` with many volumes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Home, Settings};

use crate::control;
use crate::nbd::print::Claim;
use crate::report::{Budget, Row};
use crate::stats::{Ratio, median};

/// The part of the speed of the best program that ours has to reach.
const TARGET: f64 = 0.9;
/// Seconds that a list of volumes may take.
const LIST_SECONDS: f64 = 0.2;
/// Bytes of a stretch of data in an image with holes, and from one to the next.
const STRETCH: u64 = 1 << 20;
const STRIDE: u64 = 8 << 20;
/// The volume that is copied.
const VOLUME: &str = "copied";

/// A program that copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tool {
    /// `blockd import` and `blockd export`.
    Blockd,
    /// The copier of libnbd.
    Nbdcopy,
    /// `qemu-img convert`.
    QemuImg,
}

/// Where the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From a file into a new volume.
    Import,
    /// From a volume into a new file.
    Export,
}

/// The content of the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Data without a hole.
    Full,
    /// A stretch of data in each eight.
    Sparse,
}

impl Tool {
    /// All of them, ours first.
    pub const ALL: [Self; 3] = [Self::Blockd, Self::Nbdcopy, Self::QemuImg];

    /// Its name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blockd => "blockd",
            Self::Nbdcopy => "nbdcopy",
            Self::QemuImg => "qemu-img convert",
        }
    }
}

/// How it is measured.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon's program.
    pub blockd: PathBuf,
    /// Where pool and images lie.
    pub folder: PathBuf,
    /// Bytes of the image.
    pub size: u64,
    /// Rounds, each with one run of every program.
    pub pairs: usize,
    /// Volumes to be listed.
    pub volumes: usize,
}

/// The runs of one direction with one content.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// In words: `import/full`.
    pub workload: String,
    /// Seconds of each round, in the order of [`Tool::ALL`].
    pub seconds: [Vec<f64>; 3],
}

impl Outcome {
    /// Speed of ours divided by that of the quickest other program, which is that with the lowest
    /// median.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        let [ours, others @ ..] = &self.seconds;
        let middle = |seconds: &[f64]| median(seconds).unwrap_or(f64::INFINITY);
        let named = Tool::ALL.into_iter().skip(1).zip(others);
        let (tool, best) = named.min_by(|a, b| middle(a.1).total_cmp(&middle(b.1)))?;
        let ratios: Vec<f64> = ours.iter().zip(best).map(|(ours, best)| best / ours).collect();
        Some(Claim {
            workload: self.workload.clone(),
            claim: format!("speed, ours/it; the best: {}", tool.name()),
            ratio: Ratio::of(&ratios)?,
            target: TARGET,
            pairs: ratios.len(),
        })
    }
}

impl Bench {
    /// Copies in both directions, with and without holes.
    ///
    /// # Errors
    /// When a program fails, or a copy differs from the image.
    pub fn copies(&self) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        for (content, name) in [(Content::Full, "full"), (Content::Sparse, "sparse")] {
            let mut rig = Rig::new(self, content)?;
            for (direction, word) in [(Direction::Import, "import"), (Direction::Export, "export")]
            {
                let workload = format!("{word}/{name}");
                let seconds = rig.rounds(direction, self.pairs).context(workload.clone())?;
                outcomes.push(Outcome { workload, seconds });
            }
            rig.daemon.stop()?;
        }
        Ok(outcomes)
    }

    /// The time of `blockd list` with many volumes.
    ///
    /// # Errors
    /// When the daemon fails or refuses a call.
    pub fn list(&self) -> Result<Row> {
        let settings = self.settings(16 << 30);
        let mut daemon = Daemon::new("bench-list", &settings)?;
        daemon.start()?;
        control::fill(&daemon, self.volumes)?;
        let mut seconds = Vec::new();
        // The first run reads the program.
        for round in 0..=self.pairs {
            let clock = Clock::start();
            let output = daemon.cli_output(&["list"])?;
            let took = clock.seconds();
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let lines = output.stdout.iter().filter(|byte| **byte == b'\n').count();
            ensure!(lines > self.volumes, "list shows {lines} lines");
            if round > 0 {
                seconds.push(took);
            }
        }
        daemon.stop()?;
        let name = format!("list, {} volumes, median of {}", self.volumes, self.pairs);
        let figure = median(&seconds).context("no rounds")?;
        Ok(Row::new(name, figure, "s", Budget::AtMost(LIST_SECONDS)))
    }

    fn settings(&self, pool_size: u64) -> Settings {
        Settings {
            home: Home::Below(self.folder.clone()),
            program: Some(self.blockd.clone()),
            pool_size,
            tables: "[log]\nlevel = \"warn\"".to_owned(),
            ..Settings::default()
        }
    }
}

/// A daemon, and an image that is copied.
struct Rig {
    daemon: Daemon,
    image: PathBuf,
    copy: PathBuf,
    size: u64,
    content: Content,
}

impl Rig {
    fn new(bench: &Bench, content: Content) -> Result<Self> {
        // The volume, one that is being deleted, and metadata.
        let settings = bench.settings(bench.size * 3 + (512 << 20));
        let mut daemon = Daemon::new("bench-tools", &settings)?;
        daemon.start()?;
        let (image, copy) = (daemon.folder().join("image"), daemon.folder().join("copy"));
        make_image(&image, bench.size, content)?;
        Ok(Self { daemon, image, copy, size: bench.size, content })
    }

    /// Seconds of each program in each round. A round begins with another program each time.
    fn rounds(&mut self, direction: Direction, rounds: usize) -> Result<[Vec<f64>; 3]> {
        let mut seconds: [Vec<f64>; 3] = Default::default();
        if direction == Direction::Export {
            self.copy_in(Tool::Blockd)?;
        }
        // The first round is not counted: it is compared with the image.
        for round in 0..=rounds {
            for turn in 0..Tool::ALL.len() {
                let at = (round + turn) % Tool::ALL.len();
                let tool = Tool::ALL[at];
                let took = match direction {
                    Direction::Import => self.import(tool, round == 0),
                    Direction::Export => self.export(tool, round == 0),
                };
                let took = took.with_context(|| tool.name())?;
                if round > 0 {
                    seconds[at].push(took);
                }
            }
        }
        if direction == Direction::Export {
            self.delete()?;
        }
        Ok(seconds)
    }

    fn import(&mut self, tool: Tool, compares: bool) -> Result<f64> {
        let took = self.copy_in(tool)?;
        if compares {
            self.copy_out(Tool::Nbdcopy)?;
            self.compare()?;
        }
        self.delete()?;
        Ok(took)
    }

    fn export(&mut self, tool: Tool, compares: bool) -> Result<f64> {
        let took = self.copy_out(tool)?;
        if compares {
            self.compare()?;
            self.check_holes()?;
        }
        fs::remove_file(&self.copy)?;
        Ok(took)
    }

    /// Copies the image into a new volume. Only ours makes and attaches it in the measured time.
    fn copy_in(&self, tool: Tool) -> Result<f64> {
        if tool != Tool::Blockd {
            let size = self.size.to_string();
            self.daemon.cli(&["add", "--nbd", "--size", &size, VOLUME])?;
        }
        let uri = self.daemon.uri(VOLUME);
        let mut command = match tool {
            Tool::Blockd => {
                let mut command = self.ours("import");
                command.arg(&self.image).args([VOLUME, "--format", "raw"]);
                command
            }
            Tool::Nbdcopy => {
                let mut command = Command::new("nbdcopy");
                command.args(["--flush", "--destination-is-zero"]).arg(&self.image).arg(uri);
                command
            }
            Tool::QemuImg => {
                let mut command = qemu_img();
                command.args(["-n", "--target-is-zero"]).arg(&self.image).arg(uri);
                command
            }
        };
        timed(&mut command)
    }

    fn copy_out(&self, tool: Tool) -> Result<f64> {
        let _ = fs::remove_file(&self.copy);
        let uri = self.daemon.uri(VOLUME);
        let mut command = match tool {
            Tool::Blockd => {
                let mut command = self.ours("export");
                command.arg(VOLUME);
                command
            }
            Tool::Nbdcopy => {
                let mut command = Command::new("nbdcopy");
                command.arg("--flush").arg(uri);
                command
            }
            Tool::QemuImg => {
                let mut command = qemu_img();
                command.arg(uri);
                command
            }
        };
        timed(command.arg(&self.copy))
    }

    fn ours(&self, verb: &str) -> Command {
        let mut command = self.daemon.program_command();
        command.env("BLOCKD_SOCKET", self.daemon.control_socket()).arg(verb);
        command
    }

    /// Deletes the volume. Its last client may have left a moment ago.
    fn delete(&self) -> Result<()> {
        self.daemon.cli(&["del", VOLUME, "--force"]).map(drop)
    }

    fn compare(&self) -> Result<()> {
        let files = [File::open(&self.image)?, File::open(&self.copy)?];
        let [size, copied] = [files[0].metadata()?.len(), files[1].metadata()?.len()];
        ensure!(size == copied, "the copy has {copied} bytes, not {size}");
        let mut buffers = [vec![0; 1 << 20], vec![0; 1 << 20]];
        for offset in (0..size).step_by(1 << 20) {
            let len = usize::try_from((size - offset).min(1 << 20))?;
            for (file, buffer) in files.iter().zip(&mut buffers) {
                file.read_exact_at(&mut buffer[..len], offset)?;
            }
            if buffers[0][..len] != buffers[1][..len] {
                bail!("the copy differs from the image after byte {offset}");
            }
        }
        Ok(())
    }

    /// Checks that holes of a volume are holes of the copy.
    fn check_holes(&self) -> Result<()> {
        use std::os::unix::fs::MetadataExt;

        let bytes = fs::metadata(&self.copy)?.blocks() * 512;
        let most = match self.content {
            Content::Full => return Ok(()),
            Content::Sparse => self.size / 4,
        };
        ensure!(bytes < most, "the copy takes {bytes} bytes");
        Ok(())
    }
}

/// As many requests at a time as it may have, in any order; what is written is durable.
fn qemu_img() -> Command {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", "raw", "-t", "writeback", "-m", "16", "-W"]);
    command
}

/// Runs a program to its end; returns the seconds that it took.
fn timed(command: &mut Command) -> Result<f64> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let clock = Clock::start();
    let output = command.output();
    let took = clock.seconds();
    let output =
        output.with_context(|| format!("{program}: `cargo ci bench tools` installs it"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program}: {}: {errors}", output.status);
    Ok(took)
}

/// Data that has no zeroes and does not repeat.
fn make_image(path: &Path, size: u64, content: Content) -> Result<()> {
    let file = File::create(path)?;
    file.set_len(size)?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut buffer = vec![0; usize::try_from(STRETCH)?];
    let step = if content == Content::Full { STRETCH } else { STRIDE };
    for offset in (0..size).step_by(usize::try_from(step)?) {
        random.fill(&mut buffer);
        let len = usize::try_from((size - offset).min(STRETCH))?;
        file.write_all_at(&buffer[..len], offset)?;
    }
    Ok(file.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claim_is_about_the_quickest_other_program() {
        let seconds = [vec![2.0; 9], vec![4.0; 9], vec![1.0; 9]];
        let claim = Outcome { workload: "import/full".to_owned(), seconds }.claim().unwrap();
        assert!(claim.claim.ends_with("qemu-img convert"), "{claim:?}");
        assert_eq!((claim.ratio.median, claim.target, claim.pairs), (0.5, 0.9, 9));
    }
}
