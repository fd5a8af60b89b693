//! `blockd events`.

use blockd_api::v1::{Event, EventKind, EventsRequest};
use serde::Serialize;

use super::Context;
use super::output::terminal::Tone;
use crate::error::Error;

/// Print what happens, as it happens
///
/// Pools that open or fail, volumes that come, go, are resized, attached and detached, block
/// devices that come back or fail. Goes on until the daemon ends or you press Ctrl-C. With --json,
/// an object on each line.
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

/// What `--json` prints on a line.
#[derive(Debug, Serialize)]
struct EventShape<'a> {
    sequence: u64,
    time_unix_ms: i64,
    kind: &'static str,
    pool: Option<&'a str>,
    volume: Option<&'a str>,
    text: &'a str,
    missed: u64,
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
                context.output.json_line(&shape(&event))?;
            } else {
                context.output.text(&line(&event, context))?;
            }
            left -= 1;
        }
        Ok(())
    }
}

fn shape(event: &Event) -> EventShape<'_> {
    EventShape {
        sequence: event.sequence,
        time_unix_ms: event.time_unix_ms,
        kind: kind_name(event.kind()),
        pool: Some(event.pool.as_str()).filter(|text| !text.is_empty()),
        volume: Some(event.volume.as_str()).filter(|text| !text.is_empty()),
        text: &event.text,
        missed: event.missed,
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
    let time = paint.text(Tone::Dim, &time_of_day(event.time_unix_ms));
    text.push_str(&format!("{time}  {}\n", paint.text(tone, &event.text)));
    text
}

/// Date and time in UTC. The proleptic Gregorian calendar, counted from 1 March of year 0, so that
/// the leap day is a year's last.
fn time_of_day(unix_ms: i64) -> String {
    const DAYS_TO_1970: i64 = 719_468;
    const DAYS_IN_400_YEARS: i64 = 146_097;
    let seconds = unix_ms.div_euclid(1000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let days = days + DAYS_TO_1970;
    let day = days.rem_euclid(DAYS_IN_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + days.div_euclid(DAYS_IN_400_YEARS) * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

fn kind_name(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Unspecified => "unknown",
        EventKind::PoolOpened => "pool_opened",
        EventKind::PoolCreated => "pool_created",
        EventKind::PoolFailed => "pool_failed",
        EventKind::VolumeCreated => "volume_created",
        EventKind::VolumeDeleted => "volume_deleted",
        EventKind::VolumeResized => "volume_resized",
        EventKind::VolumeAttached => "volume_attached",
        EventKind::VolumeDetached => "volume_detached",
        EventKind::Ready => "ready",
        EventKind::Stopping => "stopping",
        EventKind::DeviceRecovered => "device_recovered",
        EventKind::DeviceFailed => "device_failed",
        EventKind::DeviceCleaned => "device_cleaned",
        EventKind::SnapshotCreated => "snapshot_created",
        EventKind::VolumeCloned => "volume_cloned",
        EventKind::VolumeRolledBack => "volume_rolled_back",
        EventKind::VolumeReleased => "volume_released",
        EventKind::ExtendWaiting => "extend_waiting",
        EventKind::SpaceNormal => "space_normal",
        EventKind::SpaceLow => "space_low",
        EventKind::SpaceVeryLow => "space_very_low",
        EventKind::SpaceFull => "space_full",
        EventKind::WritesBlocked => "writes_blocked",
        EventKind::PoolGrown => "pool_grown",
        EventKind::VolumeConfigured => "volume_configured",
        EventKind::HealthAbnormal => "health_abnormal",
        EventKind::HealthRecovered => "health_recovered",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(time_of_day(0), "1970-01-01 00:00:00Z");
        assert_eq!(time_of_day(951_782_400_000), "2000-02-29 00:00:00Z");
        assert_eq!(time_of_day(1_700_000_000_999), "2023-11-14 22:13:20Z");
        assert_eq!(time_of_day(4_107_542_399_000), "2100-02-28 23:59:59Z");
        assert_eq!(time_of_day(4_107_542_400_000), "2100-03-01 00:00:00Z");
    }

    #[test]
    fn an_event_has_this_shape() {
        let event = Event {
            sequence: 7,
            time_unix_ms: 1,
            kind: EventKind::Ready.into(),
            text: "ready".to_owned(),
            ..Default::default()
        };
        let expected = r#"{"sequence":7,"time_unix_ms":1,"kind":"ready","pool":null,"volume":null,"text":"ready","missed":0}"#;
        assert_eq!(serde_json::to_string(&shape(&event)).unwrap(), expected);
    }
}
