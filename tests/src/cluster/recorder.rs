//! `blockd-csi record` between a replay and the plugin.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::sequence::Sequence;

/// A start or an end that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(60);

/// A recorder that runs.
#[derive(Debug)]
pub struct Recorder {
    child: Child,
    folder: Folder,
}

impl Recorder {
    /// Starts one before the plugin with this socket.
    ///
    /// # Errors
    /// When it does not listen.
    pub fn start(to: &Path) -> Result<Self> {
        let folder = Folder::below(Path::new("/dev/shm"), "record")?;
        let mut command = Command::new(tools::blockd_csi()?);
        command.arg("record").arg("--listen").arg(folder.path().join("s")).arg("--to").arg(to);
        command.arg("--out").arg(folder.path().join("out.jsonl")).args(["--caller", "a replay"]);
        let child = command.stdin(Stdio::null()).spawn().context("starting the recorder")?;
        let recorder = Self { child, folder };
        let is_up = || UnixStream::connect(recorder.socket()).ok();
        tools::wait_until("the recorder to listen", LIMIT, is_up)?;
        Ok(recorder)
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    /// Ends it in order. Returns the recording.
    ///
    /// # Errors
    /// When it does not end, or the recording is not complete.
    pub fn stop(mut self) -> Result<Sequence> {
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)?;
        let ended = || self.child.try_wait().ok().flatten();
        let status = tools::wait_until("the recorder to end", LIMIT, ended)?;
        ensure!(status.success(), "the recorder ended with {status}");
        let path = self.folder.path().join("out.jsonl");
        let text = std::fs::read_to_string(&path)?;
        let last = text.lines().last().unwrap_or_default();
        ensure!(last.contains("\"end\""), "the recording ends with {last}");
        Sequence::read(&path)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
