-- Settings, directives of job scripts and hints, for job_submit.lua and burst_buffer.lua. Lua 5.1 and later.
local towline = {
   -- Folder of the hints that the agent beside slurmctld writes: `slurm_hints` of its settings.
   hints = "/run/towline/slurm",
   -- Command, and what it needs to commit a hint.
   command = "/usr/local/bin/towline",
   agent = "/run/towline/agent.sock",
   repository = "s3://models/team",
   sites = "/etc/towline/sites.toml",
   -- Folder for what was committed for jobs; only the user of slurmctld may write there.
   jobs = "/var/spool/towline",
   squeue = "/usr/bin/squeue",
   -- Time that the data of a queued job is held.
   lease = "24h",
   -- What is compared: "time" or "cost".
   objective = "time",
   -- Seconds after which a hint is too old to decide.
   max_age = 600,
   -- Jobs whose inputs are held at a time, each by a pin of a site's agent: at most `[caller_pins] max_pins` there. One user has half
   -- of them at most.
   held_names = 256,
   -- Names that a job may read.
   max_inputs = 64,
}

local function contents(path)
   local file = io.open(path, "r")
   if not file then return nil end
   local text = file:read("*a")
   file:close()
   return text
end
towline.contents = contents

-- The directives of a job: `#BB_LUA towline inputs=NAME,NAME [stage_in] [lease=24h] [stage_out=PATH:NAME]`. Returns nil without one,
-- and a message if they are malformed.
function towline.directives(text)
   local found = nil
   for words in string.gmatch("\n" .. (text or ""), "\n#BB_LUA[ \t]+towline([^\n]*)") do
      found = found or { inputs = {} }
      for word in string.gmatch(words, "%S+") do
         local key, value = string.match(word, "^([^=]+)=(.+)$")
         if key == "inputs" then
            for name in string.gmatch(value, "[^,]+") do
               if not found.inputs[name] then table.insert(found.inputs, name) end
               found.inputs[name] = true
            end
         elseif key == "lease" and string.match(value, "^%d+[smhd]$") then
            found.lease = value
         elseif key == "stage_out" and string.match(value, "^/.*:[^:]+$") then
            found.from, found.to = string.match(value, "^(.*):([^:]+)$")
         elseif word == "stage_in" then
            found.stage_in = true
         else
            return nil, "towline: cannot read the directive " .. word
         end
      end
   end
   -- Each is a file to read while slurmctld waits.
   if found and #found.inputs > towline.max_inputs then
      return nil, "towline: a job may have " .. towline.max_inputs .. " inputs"
   end
   if found and found.stage_in and #found.inputs == 0 then
      return nil, "towline: stage_in needs inputs=NAME"
   end
   return found
end

-- Name of the file of a hint, as the agent spells it.
function towline.file_name(name)
   local escaped = string.gsub(name, "[^%w%._@%-]", function(byte) return string.format("%%%02x", string.byte(byte)) end)
   return (string.gsub(escaped, "^%.", "%%2e"))
end

-- The hint about one name, for `user`; or nil and the reason.
function towline.hint(name, user)
   local text = contents(towline.hints .. "/" .. towline.file_name(name))
   local at, users, elsewhere, sites = string.match(text or "", "^towline 1\nat (%d+)\nusers ([^\n]*)\nelsewhere (%a+)\n(.*)$")
   if not at then return nil, "there is no hint about " .. name end
   if not (users == "*" or string.find("," .. users .. ",", "," .. user .. ",", 1, true)) then
      -- As an absent one.
      return nil, "there is no hint about " .. name
   end
   if os.time() - tonumber(at) > towline.max_age then return nil, "the hint about " .. name .. " is too old" end
   local hint = { elsewhere = elsewhere, sites = {} }
   for line in string.gmatch(sites, "([^\n]*)\n") do
      local site, verdict, missing, ms, usd, why = string.match(line, "^([^\t]*)\t(%a+)\t(%d+)\t(%d+)\t(%d+)\t(.*)$")
      if site then
         hint.sites[site] =
            { verdict = verdict, missing = tonumber(missing), ms = tonumber(ms), usd = tonumber(usd), why = why }
      end
   end
   return hint
end

-- Sites for a job that reads `names`: those where all of them may go, the best first; the others with the reason; whether nodes without
-- a site will do; and the reasons why names have no hint, which decide nothing. Nil if no name has one.
function towline.place(names, user)
   local all, elsewhere, known, problems = {}, true, 0, {}
   for number, name in ipairs(names) do
      local hint, problem = towline.hint(name, user)
      if hint then
         known = known + 1
         elsewhere = elsewhere and hint.elsewhere == "allow"
         for site, one in pairs(hint.sites) do
            local sum = all[site] or { site = site, seen = 0, missing = 0, ms = 0, usd = 0 }
            all[site] = sum
            sum.seen, sum.missing = sum.seen + 1, sum.missing + one.missing
            sum.ms, sum.usd = sum.ms + one.ms, sum.usd + one.usd
            if one.verdict ~= "allow" then sum.why = sum.why or (name .. ": " .. one.verdict .. " " .. one.why) end
         end
      else
         table.insert(problems, problem)
      end
   end
   if known == 0 then return nil, problems end
   local allowed, denied = {}, {}
   for site, sum in pairs(all) do
      if sum.why or sum.seen < known then
         table.insert(denied, site .. " (" .. (sum.why or "unknown") .. ")")
      else
         table.insert(allowed, sum)
      end
   end
   local first, second = "ms", "usd"
   if towline.objective == "cost" then first, second = second, first end
   table.sort(allowed, function(one, other)
      if one[first] ~= other[first] then return one[first] < other[first] end
      if one[second] ~= other[second] then return one[second] < other[second] end
      return one.site < other.site
   end)
   table.sort(denied)
   return { allowed = allowed, denied = denied, elsewhere = elsewhere }, problems
end

local function quoted(text)
   return "'" .. string.gsub(text, "'", "'\\''") .. "'"
end

-- Runs a command; returns whether it succeeded, and what it said.
function towline.run(words)
   local log = os.tmpname()
   local line = {}
   for _, word in ipairs(words) do table.insert(line, quoted(word)) end
   local status = os.execute(table.concat(line, " ") .. " </dev/null >" .. quoted(log) .. " 2>&1")
   local said = contents(log) or ""
   os.remove(log)
   -- Lua 5.1 returns the exit status, later ones true.
   return status == 0 or status == true, said
end

-- Arguments of the towline command.
function towline.arguments(more)
   local words = {
      "env", "TOWLINE_AGENT=" .. towline.agent, "TOWLINE_REPO=" .. towline.repository, towline.command
   }
   for _, word in ipairs(more) do table.insert(words, word) end
   return words
end

return towline
