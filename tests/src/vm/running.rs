//! A running machine: the output of its script, line by line, and its end.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use blockd_testkit::clock::Clock;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::console;

/// Printed by the guest's first process when the script has ended.
const ENDED: &str = "@@ended ";
/// In what the kernel says when softdog resets the machine.
const RESET: &str = "Initiating system reboot";
/// Printed by it before the script.
const STARTED: &str = "@@started";
/// The kernel's message when a fault of qemu's ends it: while the kernel changes its own code, one
/// emulated processor runs the previous bytes, and meets a breakpoint without an owner.
const EMULATOR: &str = "Oops: int3";
/// For a boot, which takes seconds. A processor that qemu does not bring up hangs for ever.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// Lines of output that an error shows.
const SHOWN: usize = 40;

/// The output of a script.
#[derive(Clone, Debug)]
pub struct Output {
    /// All lines, errors among them.
    pub text: String,
    /// From start to end, the boot included.
    pub seconds: f64,
}

/// A machine whose script has not ended. Dropped, it is switched off.
#[derive(Debug)]
pub struct Running {
    qemu: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    text: String,
    status: Option<i32>,
    folder: PathBuf,
    /// Parts of complaints that are none here.
    expected: Vec<String>,
    started: Clock,
    limit: Duration,
}

impl Running {
    pub(super) fn start(
        mut command: Command,
        folder: PathBuf,
        limit: Duration,
        expected: Vec<String>,
    ) -> Result<Self> {
        let errors = fs::File::create(folder.join("qemu"))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let started = Clock::start();
        let mut qemu = command.spawn().context("cannot start qemu")?;
        let stdout = qemu.stdout.take().context("qemu has no stdout")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = Vec::new();
            while matches!(reader.by_ref().read_until(b'\n', &mut line), Ok(1..)) {
                let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
                line.clear();
                if sender.send(text).is_err() {
                    return;
                }
            }
        });
        let stdin = qemu.stdin.take();
        let (text, status) = (String::new(), None);
        Ok(Self { qemu, stdin, lines, text, status, folder, expected, started, limit })
    }

    /// Waits until the guest is as far as the script.
    pub(super) fn booted(&mut self) -> Result<()> {
        let limit = self.limit;
        self.limit = limit.min(BOOT_LIMIT);
        let started = self.wait_for(STARTED);
        self.limit = limit;
        self.text.clear();
        started.map(|_| ())
    }

    /// Whether the kernel died of the emulator and not by itself, or hangs before it has begun with
    /// anything of ours.
    pub(super) fn emulator_failed(&self) -> bool {
        self.console().contains(EMULATOR) || self.started.elapsed() >= BOOT_LIMIT
    }

    /// The next line that contains this.
    ///
    /// # Errors
    /// When the script ends or the time is over first.
    pub fn wait_for(&mut self, wanted: &str) -> Result<String> {
        self.wait_for_any(&[wanted])
    }

    /// The next line that contains one of these.
    ///
    /// # Errors
    /// As [`Self::wait_for`].
    pub fn wait_for_any(&mut self, wanted: &[&str]) -> Result<String> {
        while let Some(line) = self.line()? {
            if wanted.iter().any(|wanted| line.contains(wanted)) {
                return Ok(line);
            }
        }
        Err(self.failure(&format!("the script ended without saying {wanted:?}")))
    }

    /// Stops all of the machine, as a host that freezes. Its clocks jump when it runs again.
    ///
    /// # Errors
    /// When the machine is gone.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets a frozen machine run again.
    ///
    /// # Errors
    /// When the machine is gone.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.qemu.id())?);
        kill(pid, signal).context("signalling the machine")
    }

    /// A line for the script to read.
    ///
    /// # Errors
    /// When the machine is gone.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("the machine has no input")?;
        writeln!(stdin, "{line}").and_then(|()| stdin.flush()).context("speaking to the machine")
    }

    /// Waits for the end of the script.
    ///
    /// # Errors
    /// When it does not end with 0, the kernel complained, or the time is over.
    pub fn finish(mut self) -> Result<Output> {
        while self.line()?.is_some() {}
        match self.status {
            Some(0) => {}
            Some(status) => return Err(self.failure(&format!("the script ended with {status}"))),
            None => return Err(self.failure("the machine stopped before the script ended")),
        }
        let seconds = self.started.elapsed().as_secs_f64();
        self.wait_for_exit()?;
        self.close(seconds)
    }

    /// The archive that the guest's kernel unpacks.
    pub(super) fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// Waits for the end of a qemu without a guest: the guest has migrated to another one, or never
    /// came.
    ///
    /// # Errors
    /// When qemu does not end, or the kernel had complained.
    pub fn left(mut self) -> Result<()> {
        self.wait_for_exit()?;
        self.close(0.0).map(|_| ())
    }

    /// Waits for the end of a qemu that was asked to end; how it has ended by itself, if `asked`
    /// says that it was gone before.
    ///
    /// # Errors
    /// As [`Self::left`].
    pub fn quit(mut self, asked: Result<()>) -> Result<Option<String>> {
        let Err(error) = asked else { return self.left().map(|()| None) };
        self.wait_for_exit()?;
        let status = self.qemu.wait()?;
        let said = fs::read_to_string(self.folder.join("qemu")).unwrap_or_default();
        self.close(0.0)?;
        Ok(Some(format!("{error:#}; it has ended with {status}, and said: {}", said.trim())))
    }

    /// Cuts the power, wherever the guest is.
    ///
    /// # Errors
    /// When the machine had stopped by itself, or the kernel had complained.
    pub fn cut(&mut self) -> Result<Output> {
        if self.qemu.try_wait()?.is_some() {
            return Err(self.failure("the machine stopped before its power was cut"));
        }
        self.qemu.kill().context("cutting the power")?;
        self.qemu.wait()?;
        self.collect()
    }

    /// Collects the output of a machine that its watchdog has reset, which ends qemu.
    ///
    /// # Errors
    /// When it has stopped for another reason, or the kernel had complained.
    pub fn reset(&mut self) -> Result<Output> {
        self.wait_for_exit()?;
        if !self.console().contains(RESET) {
            return Err(self.failure("the machine has stopped, and its watchdog did not reset it"));
        }
        self.collect()
    }

    /// Collects the output after the end, which has arrived, but may not have been read.
    fn collect(&mut self) -> Result<Output> {
        while let Ok(line) = self.lines.recv() {
            self.text.push_str(&line);
            self.text.push('\n');
        }
        let seconds = self.started.elapsed().as_secs_f64();
        self.close(seconds)
    }

    /// Collects the output after the end. Fails when the kernel has reported an error.
    fn close(&mut self, seconds: f64) -> Result<Output> {
        if let Some(said) = console::complaint(&self.console(), &self.expected) {
            return Err(self.failure(&format!("the kernel complained:\n{said}")));
        }
        // Kept only when something is to be found out.
        let _ = fs::remove_dir_all(&self.folder);
        Ok(Output { text: std::mem::take(&mut self.text), seconds })
    }

    /// Switching off takes a moment, and may fail to come about.
    fn wait_for_exit(&mut self) -> Result<()> {
        while self.qemu.try_wait()?.is_none() {
            if self.started.elapsed() > self.limit {
                return Err(self.failure("the machine does not switch off"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn console(&self) -> String {
        let bytes = fs::read(self.folder.join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn line(&mut self) -> Result<Option<String>> {
        self.line_within(self.limit)
    }

    /// The next line; none after the script's end.
    ///
    /// # Errors
    /// When there is none within this time, or the machine's own time is over.
    pub fn line_within(&mut self, limit: Duration) -> Result<Option<String>> {
        if self.status.is_some() {
            return Ok(None);
        }
        let left = self.limit.saturating_sub(self.started.elapsed()).min(limit);
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                if let Some(status) = line.strip_prefix(ENDED) {
                    let status = status.trim().parse();
                    self.status = Some(status.context("how the script ended")?);
                    return Ok(None);
                }
                self.text.push_str(&line);
                self.text.push('\n');
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(self.failure("the time is over")),
        }
    }

    /// An error with the end of what was said, and where the rest is. The reason comes last: of a
    /// long text the end is what others show.
    pub fn failure(&self, what: &str) -> anyhow::Error {
        let folder = self.folder.display();
        let _ = fs::write(self.folder.join("output"), &self.text);
        let said = last_lines(&self.text);
        let console = self.console();
        let kernel = last_lines(&console);
        let what = match console::complaint(&console, &self.expected) {
            Some(said) if !what.contains("complained") => {
                format!("{what}, and the kernel complained:\n{said}")
            }
            _ => what.to_owned(),
        };
        anyhow!("kernel:\n{kernel}\nscript:\n{said}\n{what}\nkept in {folder}")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}
