//! The monitor of a machine: one JSON object a line over a Unix socket, as QEMU's protocol QMP has
//! it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockd_testkit::tools;
use serde_json::{Value, json};

/// QEMU makes the socket before anything else, and answers a command in milliseconds; an emulated
/// machine on a busy host in seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to the monitor of a machine that was started with
/// `-qmp unix:PATH,server=on,wait=off`.
#[derive(Debug)]
pub struct Monitor {
    reader: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects as soon as the socket is there.
    ///
    /// # Errors
    /// When it is not in time, or speaks another protocol.
    pub fn connect(socket: &Path) -> Result<Self> {
        let connect = || UnixStream::connect(socket).ok();
        let what = format!("the monitor {}", socket.display());
        let stream = tools::wait_until(&what, PATIENCE, connect)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self { reader: BufReader::new(stream) };
        let greeting = monitor.line()?;
        if greeting.get("QMP").is_none() {
            bail!("no greeting of a monitor: {greeting}");
        }
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Runs a command, and returns its result. Events in between are skipped.
    ///
    /// # Errors
    /// When QEMU refuses the command, or is gone.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.reader.get_mut(), "{line}").with_context(|| command.to_owned())?;
        loop {
            let mut answer = self.line().with_context(|| command.to_owned())?;
            if let Some(error) = answer.get("error") {
                bail!("{command} {arguments}: {error}");
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).context("reading from the monitor")? == 0 {
            bail!("the monitor has closed the connection");
        }
        serde_json::from_str(&line).with_context(|| format!("no JSON: {line:?}"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use blockd_testkit::folder::Folder;

    use super::*;

    #[test]
    fn results_are_found_among_events_and_refusals_are_errors() {
        let folder = Folder::new("qmp").unwrap();
        let socket = folder.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut say = |text: &str| writeln!(stream, "{text}").unwrap();
            say(r#"{"QMP": {"version": {}}}"#);
            let mut asked = Vec::new();
            for answer in [
                r#"{"return": {}}"#,
                "{\"event\": \"STOP\"}\n{\"return\": {\"status\": \"paused\"}}",
                r#"{"error": {"class": "GenericError", "desc": "no"}}"#,
            ] {
                asked.push(lines.next().unwrap().unwrap());
                say(answer);
            }
            asked
        });
        let mut monitor = Monitor::connect(&socket).unwrap();
        let status = monitor.ask("query-status", json!({})).unwrap();
        assert_eq!(status["status"], "paused");
        let refused = monitor.ask("migrate", json!({"uri": "unix:x"})).unwrap_err();
        assert!(refused.to_string().contains("GenericError"), "{refused}");
        monitor.ask("cont", json!({})).unwrap_err();
        let asked = server.join().unwrap();
        let last: Value = serde_json::from_str(&asked[2]).unwrap();
        assert_eq!(last, json!({"execute": "migrate", "arguments": {"uri": "unix:x"}}));
    }
}
