//! A machine that runs lines of shell one after the other, and says how each ended.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;

use crate::vm::{Running, Vm};

/// Printed by the machine after each line.
const ANSWERED: &str = "@@answered ";
/// A line of shell that takes longer is stuck: the daemon waits for 200 s for a dead host's lease.
const PATIENCE: Duration = Duration::from_secs(240);
/// Runs what it reads. The mark stands on a line of its own whatever was printed last.
const LOOP: &str = r#"
echo @@answered 0
while read -r line; do
    if [ "$line" = @@end ]; then break; fi
    eval "$line" </dev/null
    printf '\n@@answered %s\n' $?
done
"#;

/// The output of a line of shell, and how it ended.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) status: i32,
    /// Seconds, under emulation.
    pub(super) seconds: f64,
}

#[derive(Debug)]
pub(super) struct Machine {
    name: String,
    running: Running,
    /// The line that runs, and since when.
    line: String,
    started: Clock,
}

impl Machine {
    /// Boots. The script is run first; what it defines is there for each line.
    pub(super) fn boot(name: &str, vm: &Vm, script: &str) -> Result<Self> {
        let running = vm.start(&format!("{script}{LOOP}"))?;
        let line = "its start".to_owned();
        let mut machine = Self { name: name.to_owned(), running, line, started: Clock::start() };
        machine.answer()?;
        Ok(machine)
    }

    /// Starts a line. It answers later.
    pub(super) fn send(&mut self, line: &str) -> Result<()> {
        line.clone_into(&mut self.line);
        self.started = Clock::start();
        self.running.send(line)
    }

    /// Starts a line, and waits until it has printed one that begins like this.
    pub(super) fn begin(&mut self, line: &str, wanted: &str) -> Result<()> {
        self.send(line)?;
        loop {
            let left = PATIENCE.saturating_sub(self.started.elapsed());
            let said = self.running.line_within(left);
            let said = said.with_context(|| format!("{}: {line}", self.name))?;
            let Some(said) = said else { bail!("{}: ended during: {line}", self.name) };
            ensure!(!said.starts_with(ANSWERED), "{}: {line}: not one `{wanted}`", self.name);
            if said.starts_with(wanted) {
                return Ok(());
            }
        }
    }

    /// Waits for the end of the line that was sent.
    pub(super) fn answer(&mut self) -> Result<Answer> {
        let mut text = String::new();
        loop {
            let left = PATIENCE.saturating_sub(self.started.elapsed());
            let line = self.running.line_within(left);
            let line = line.with_context(|| format!("{}: {}", self.name, self.line))?;
            let Some(line) = line else { bail!("{}: ended during: {}", self.name, self.line) };
            if let Some(status) = line.strip_prefix(ANSWERED) {
                let seconds = self.started.elapsed().as_secs_f64();
                let text = text.trim_end().to_owned();
                return Ok(Answer { text, status: status.trim().parse()?, seconds });
            }
            text.push_str(&line);
            text.push('\n');
        }
    }

    /// Waits for the answer of a host that was kept from its disk, and has to notice it. True
    /// where its watchdog has reset it instead, as it may after a minute without its lease.
    pub(super) fn was_reset(&mut self) -> Result<bool> {
        // The line was begun before all that has happened since.
        self.started = Clock::start();
        match self.answer() {
            Ok(noticed) => {
                ensure!(noticed.status == 0, "{}: {}", self.name, noticed.text);
                Ok(false)
            }
            Err(error) if format!("{error:#}").contains("ended during") => {
                self.running.reset().with_context(|| self.name.clone())?;
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    /// Runs a line to its end.
    pub(super) fn run(&mut self, line: &str) -> Result<Answer> {
        self.send(line)?;
        self.answer()
    }

    /// Runs a line that has to end with 0, and returns what it printed.
    pub(super) fn ok(&mut self, line: &str) -> Result<String> {
        let Answer { text, status, .. } = self.run(line)?;
        ensure!(status == 0, "{}: {line}: ended with {status}\n{text}", self.name);
        Ok(text)
    }

    /// The same, and returns the seconds that it took.
    pub(super) fn seconds(&mut self, line: &str) -> Result<f64> {
        self.ok(line)?;
        Ok(self.started.elapsed().as_secs_f64())
    }

    /// Cuts the power, and returns everything that was printed.
    pub(super) fn cut(&mut self) -> Result<String> {
        Ok(self.running.cut().with_context(|| self.name.clone())?.text)
    }

    /// The machine itself.
    pub(super) fn running(&self) -> &Running {
        &self.running
    }

    /// Ends the machine in order.
    pub(super) fn end(mut self) -> Result<()> {
        self.running.send("@@end")?;
        self.running.finish().with_context(|| self.name)?;
        Ok(())
    }
}
