//! A browser that tests look at pages with: Chromium without a window, told what to do over WebDriver
//! (https://www.w3.org/TR/webdriver2/).

use std::process::Command;

use serde_json::{Value, json};
use ureq::Agent;

use crate::common::{Folder, PATIENCE, Running, is_installed};

/// What a session of Chromium needs on a machine of tests, and nothing that asks somebody outside.
const ARGUMENTS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
];

pub(crate) struct Browser {
    agent: Agent,
    /// The address of the session.
    session: String,
    _driver: Running,
    _profile: Folder,
}

impl Browser {
    /// `None` where it is not installed.
    pub(crate) fn start(window: (u32, u32)) -> Option<Self> {
        if !is_installed("chromium") || !is_installed("chromedriver") {
            return None;
        }
        let profile = Folder::new();
        let mut driver =
            Running::start("chromedriver", Command::new("chromedriver").arg("--port=0"));
        let port = loop {
            let line = driver.line();
            let port = line.split_once("started successfully on port ");
            if let Some((_, port)) = port {
                break port.trim_end_matches('.').to_owned();
            }
        };
        let driver_at = format!("http://127.0.0.1:{port}/session");
        let agent: Agent = Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .proxy(None)
            .build()
            .into();
        let mut arguments = ARGUMENTS.map(str::to_owned).to_vec();
        arguments.push(format!("--user-data-dir={}", profile.file("profile")));
        arguments.push(format!("--window-size={},{}", window.0, window.1));
        let options = json!({ "args": arguments });
        let always = json!({ "browserName": "chrome", "goog:chromeOptions": options });
        let body = json!({ "capabilities": { "alwaysMatch": always } });
        let session = value(agent.post(&driver_at).send_json(&body));
        let session = format!("{driver_at}/{}", session["sessionId"].as_str().unwrap());
        Some(Self { agent, session, _driver: driver, _profile: profile })
    }

    fn tell(&self, command: &str, body: &Value) -> Value {
        value(self.agent.post(format!("{}/{command}", self.session)).send_json(body))
    }

    pub(crate) fn open(&self, url: &str) {
        self.tell("url", &json!({ "url": url }));
    }

    /// The value of an expression in JavaScript.
    pub(crate) fn evaluate(&self, expression: &str) -> Value {
        let script = format!("return ({expression});");
        self.tell("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// The texts of the elements that a selector of CSS names.
    pub(crate) fn texts(&self, selector: &str) -> Vec<String> {
        let selector = serde_json::to_string(selector).unwrap();
        let elements = format!("[...document.querySelectorAll({selector})]");
        let texts = self.evaluate(&format!("{elements}.map((it) => it.textContent)"));
        serde_json::from_value(texts).unwrap()
    }

    /// What the window shows, as PNG.
    pub(crate) fn screenshot(&self) -> Vec<u8> {
        let picture = value(self.agent.get(format!("{}/screenshot", self.session)).call());
        from_base64(picture.as_str().unwrap())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Else the browser would live on without its driver. Nothing is asserted: a test may have failed.
        let _ = self.agent.delete(&self.session).call();
    }
}

/// The value of the answer to a command.
fn value(answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Value {
    let mut answer: Value = answer.unwrap().body_mut().read_json().unwrap();
    let value = answer["value"].take();
    assert!(value["error"].is_null(), "{value}");
    value
}

/// The bytes of a text in base 64 (RFC 4648, section 4).
fn from_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{byte} is no digit"),
    };
    let digits: Vec<u8> = text.trim_end_matches('=').bytes().map(digit).collect();
    let group = |group: &[u8]| {
        let bits = group.iter().fold(0_u32, |bits, &digit| bits << 6 | u32::from(digit));
        let bits = bits << (6 * (4 - group.len()));
        bits.to_be_bytes()[1..group.len()].to_vec()
    };
    digits.chunks(4).flat_map(group).collect()
}
