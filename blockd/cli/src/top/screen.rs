//! The interactive screen: draws each second, and at each key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_media::error::Error;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use super::draw::{Page, View, draw};
use super::history::History;
use super::model::{Answers, Snapshot};
use super::sort::Sort;
use super::{INTERVAL, ask};
use crate::client::Client;

/// How long the thread that reads keys takes to see that it is no longer needed.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// Shows the screen until the user quits. The terminal is as before afterwards, also on a panic.
pub(super) async fn run(client: &mut Client, pool: &str, colour: bool) -> Result<(), Error> {
    let terminal = ratatui::try_init().map_err(terminal_error)?;
    let stop = Arc::new(AtomicBool::new(false));
    let keys = read_keys(&stop);
    let shown = Screen {
        terminal,
        client,
        pool,
        before: None,
        view: View::default(),
        history: History::default(),
    };
    let ended = shown.show(keys, colour).await;
    stop.store(true, Ordering::Relaxed);
    ratatui::restore();
    ended
}

struct Screen<'a> {
    terminal: DefaultTerminal,
    client: &'a mut Client,
    pool: &'a str,
    before: Option<Answers>,
    view: View,
    history: History,
}

impl Screen<'_> {
    async fn show(mut self, mut keys: mpsc::Receiver<Event>, colour: bool) -> Result<(), Error> {
        self.view.colour = colour;
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut snapshot = Snapshot::between(None, &Answers::default());
        loop {
            snapshot.sort(self.view.sort);
            let drawn =
                self.terminal.draw(|frame| draw(frame, &snapshot, &self.history, &self.view));
            drawn.map_err(terminal_error)?;
            tokio::select! {
                _ = ticks.tick(), if !self.view.paused => self.refresh(&mut snapshot).await,
                key = keys.recv() => match key {
                    Some(Event::Key(key)) if apply(&mut self.view, key, &snapshot) => {
                        return Ok(());
                    }
                    Some(_) => {}
                    None => return Ok(()),
                },
            }
        }
    }

    /// A daemon that does not answer is said on the screen, and asked again.
    async fn refresh(&mut self, snapshot: &mut Snapshot) {
        match ask(self.client, self.pool).await {
            Ok(now) => {
                *snapshot = Snapshot::between(self.before.as_ref(), &now);
                // The first answer has no rates.
                if snapshot.interval_ns > 0 {
                    self.history.note(snapshot);
                }
                self.before = Some(now);
                self.view.failure = None;
            }
            Err(error) => self.view.failure = Some(error.to_string()),
        }
    }
}

/// Applies a key; returns true when it ends the program.
fn apply(view: &mut View, key: KeyEvent, snapshot: &Snapshot) -> bool {
    if key.kind == KeyEventKind::Release {
        return false;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => return true,
        KeyCode::Char('q') => return true,
        KeyCode::Esc if !view.help => return true,
        KeyCode::Esc => view.help = false,
        KeyCode::Char('h' | '?') => view.help = !view.help,
        KeyCode::Char('s') => view.sort = view.sort.next(),
        KeyCode::Char('n') => view.sort = Sort::Name,
        KeyCode::Char('i') => view.sort = Sort::Operations,
        KeyCode::Char('b') => view.sort = Sort::Bytes,
        KeyCode::Char('l') => view.sort = Sort::Latency,
        KeyCode::Char('m') => view.sort = Sort::Space,
        KeyCode::Char('p' | ' ') => view.paused = !view.paused,
        KeyCode::Tab => turn(view, view.page.next()),
        KeyCode::Char(digit @ '1'..='9') => {
            let pages = ('1'..).zip(Page::ALL);
            let page = pages.filter(|(key, _)| *key == digit).map(|(_, page)| page).next();
            turn(view, page.unwrap_or(view.page));
        }
        KeyCode::Char('j') | KeyCode::Down => {
            let rows = view.page.row_count(snapshot);
            view.scroll = (view.scroll + 1).min(rows.saturating_sub(1));
        }
        KeyCode::Char('k') | KeyCode::Up => view.scroll = view.scroll.saturating_sub(1),
        _ => {}
    }
    false
}

/// Shows a page from its first row on.
fn turn(view: &mut View, page: Page) {
    (view.page, view.scroll) = (page, 0);
}

/// Reads keys on a thread of its own: there is no other way to wait for them and for the daemon.
fn read_keys(stop: &Arc<AtomicBool>) -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(16);
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            match event::poll(KEY_WAIT) {
                Ok(false) => {}
                Ok(true) => {
                    let Ok(event) = event::read() else { return };
                    if sender.blocking_send(event).is_err() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    });
    receiver
}

fn terminal_error(source: std::io::Error) -> Error {
    Error::io("drawing on the terminal", source)
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::answers;
    use super::*;

    fn press(view: &mut View, code: KeyCode) -> bool {
        let snapshot = Snapshot::between(None, &answers(4));
        apply(view, KeyEvent::new(code, KeyModifiers::NONE), &snapshot)
    }

    #[test]
    fn keys_do_what_the_help_says() {
        let mut view = View::default();
        assert!(press(&mut view, KeyCode::Char('q')));
        assert!(press(&mut view, KeyCode::Esc));
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(apply(&mut view, interrupt, &Snapshot::between(None, &answers(4))));
        for key in ['s', 'p', 'h'] {
            assert!(!press(&mut view, KeyCode::Char(key)));
        }
        assert_eq!((view.sort, view.paused, view.help), (Sort::Operations, true, true));
        assert!(!press(&mut view, KeyCode::Esc));
        assert!(!view.help);
        for _ in 0..9 {
            press(&mut view, KeyCode::Char('j'));
        }
        assert_eq!(view.scroll, 1);
        press(&mut view, KeyCode::Up);
        assert_eq!(view.scroll, 0);
    }

    #[test]
    fn each_order_and_each_page_has_a_key() {
        let mut view = View::default();
        let orders = ['i', 'b', 'l', 'm', 'n'].map(|key| {
            press(&mut view, KeyCode::Char(key));
            view.sort.name()
        });
        assert_eq!(orders, ["IOPS", "bytes", "latency", "space", "name"]);
        view.scroll = 1;
        let pages = ['2', '3', '4', '5', '1', '9'].map(|key| {
            press(&mut view, KeyCode::Char(key));
            view.page.name()
        });
        assert_eq!(pages, ["stages", "pools", "devices", "clients", "volumes", "volumes"]);
        assert_eq!(view.scroll, 0);
        for _ in Page::ALL {
            press(&mut view, KeyCode::Tab);
        }
        assert_eq!(view.page, Page::Volumes);
    }
}
