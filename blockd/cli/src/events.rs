//! `blockd events`.

use blockd_api::v1::{Event, EventKind, EventsRequest};
use blockd_media::error::Error;
use blockd_media::units;

use super::Context;
use super::output::terminal::Tone;

/// Print what happens, as it happens
///
/// Pools that open or fail, devices that leave a pool, volumes that come, go, are resized, attached
/// and detached, block devices that come back or fail. Goes on until the daemon ends or you press
/// Ctrl-C. With --json, an object on each line.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd events --replay")]
pub(crate) struct Events {
    /// Begin with the events that the daemon still remembers
    #[arg(long)]
    pub replay: bool,

    /// Only what happens to this pool
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// End after this many
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
}

impl Events {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let request = EventsRequest { replay: self.replay, pool: self.pool };
        let mut stream = client.events(request).await?;
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0 {
            let message = stream.message().await.map_err(|status| client.failed(&status))?;
            let Some(event) = message else { break };
            if context.output.is_json() {
                context.output.json_line(&event)?;
            } else {
                context.output.text(&line(&event, context))?;
            }
            left -= 1;
        }
        Ok(())
    }
}

fn line(event: &Event, context: &Context) -> String {
    let paint = context.output.paint();
    let mut text = String::new();
    if event.missed > 0 {
        let missed = format!("{} event(s) missed", event.missed);
        text.push_str(&format!("{}\n", paint.text(Tone::Warning, &missed)));
    }
    let tone = match event.kind() {
        EventKind::PoolFailed | EventKind::DeviceFailed => Tone::Bad,
        EventKind::Ready => Tone::Good,
        _ => Tone::Plain,
    };
    let time = paint.text(Tone::Dim, &units::utc(event.time_unix_ms));
    text.push_str(&format!("{time}  {}\n", paint.text(tone, &event.text)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(units::utc(0), "1970-01-01 00:00:00Z");
        assert_eq!(units::utc(951_782_400_000), "2000-02-29 00:00:00Z");
        assert_eq!(units::utc(1_700_000_000_999), "2023-11-14 22:13:20Z");
        assert_eq!(units::utc(4_107_542_399_000), "2100-02-28 23:59:59Z");
        assert_eq!(units::utc(4_107_542_400_000), "2100-03-01 00:00:00Z");
    }
}
